"""Texts and bytes of single tokens, in the two ways in which vocabularies write a space."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spec_server.answer import Part
from spec_server.jobs import TokenInfo
from spec_server.logprobs import TextTokens
from spec_server.words import Words

PIECES = ["▁", "a", "t", "h", "e", ".", "th", "the", "▁the", "▁a", "▁.", "▁t"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentence_pieces() -> Words:
    """As Llama 2 and Mistral have it: the decoder takes a space off the beginning of a text."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "</s>", *BYTES, *PIECES])}
    merges = [("t", "h"), ("th", "e"), ("▁t", "he"), ("▁", "the"), ("▁", "a"), ("▁", ".")]
    raw = Tokenizer(
        models.BPE(
            vocab,
            [(a, b) for a, b in merges if a in vocab and b in vocab],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return words_of(raw, eos_token="</s>", unk_token="<unk>")


def byte_level() -> Words:
    letters = [*pre_tokenizers.ByteLevel.alphabet(), "Ġ.", "Ġa", "th"]
    vocab = {letter: i for i, letter in enumerate(["</s>", *letters])}
    raw = Tokenizer(models.BPE(vocab, [("Ġ", "."), ("Ġ", "a"), ("t", "h")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    # The setting of Llama 3's files, which would turn " ." into "."
    return words_of(raw, eos_token="</s>", clean_up_tokenization_spaces=True)


def words_of(raw: Tokenizer, **settings) -> Words:
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, **settings)
    tokenizer = SimpleNamespace(
        wrapper=SimpleNamespace(_tokenizer=fast),
        encode=fast.encode,
        stop_ids=frozenset({fast.eos_token_id}),
    )
    return Words(tokenizer)


KINDS = {"sentence pieces": sentence_pieces, "byte level": byte_level}
TEXT = " the . a é the 👍 th"


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_bytes_of_tokens_join_to_the_text(kind):
    words = KINDS[kind]()
    ids = words.encode_bare(f"a{TEXT}")[1:]
    assert words.token_text(words.encode_bare("a .")[-1]) == " ."
    assert bytes(b for i in ids for b in words.token_bytes(i)).decode() == TEXT
    plain = [text for i in ids if "\ufffd" not in (text := words.token_text(i))]
    assert "".join(plain) == "".join(letter for letter in TEXT if letter.isascii())
    assert words.token_text(words.hf.eos_token_id) == "</s>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_cut", range(len(TEXT) + 1))
def test_tokens_are_picked_by_their_place_in_the_text(kind, n_cut):
    """A beginning of the text is left out, wherever it ends; tokens may come late or early."""
    words = KINDS[kind]()
    ids = words.encode_bare(f"a{TEXT}")[1:]
    infos = [TokenInfo(i, -0.5) for i in [*ids, words.hf.eos_token_id]]
    whole, late = TextTokens(words), TextTokens(words)
    whole.add(infos)
    picked = whole.pick([Part("reasoning", TEXT[:n_cut]), Part("text", TEXT[n_cut:], at=n_cut)])
    data = bytes(b for info in picked for b in words.token_bytes(info.id)).decode()
    assert data.endswith(TEXT[n_cut:]) and len(data) <= len(TEXT) - n_cut + 3
    late.add(infos)
    letters = [Part("text", TEXT[at], at=at) for at in range(n_cut, len(TEXT))]
    found = [info for letter in letters for info in late.pick([letter])]
    assert found == picked
    assert TextTokens(words).pick([Part("text", "a")]) == []
