from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_core.text import TextStream


class Bytes:
    """A byte-level vocabulary: a token is any string of bytes."""

    def __init__(self, *vocabulary: bytes) -> None:
        self.vocabulary = vocabulary

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.vocabulary[t] for t in tokens).decode("utf-8", errors="replace")


class ByteFallback(Bytes):
    """Like the decoders that turn every byte of a run that is not UTF-8 into U+FFFD."""

    def decode(self, tokens: Sequence[int]) -> str:
        text, run = "", b""
        for token in [*tokens, None]:
            piece = b"" if token is None else self.vocabulary[token]
            if len(piece) == 1 and piece[0] >= 0x80:
                run += piece
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\N{REPLACEMENT CHARACTER}" * len(run)
            text, run = text + piece.decode(), b""
        return text


class Words:
    """A vocabulary whose leading space disappears at the start of a text."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.words[t] for t in tokens).removeprefix(" ")


def streamed(
    decode: Callable[[Sequence[int]], str],
    tokens: Sequence[int],
    stops: Sequence[str] = (),
    tail: Sequence[int] = (),
) -> list[str]:
    """The pieces given out for each token, then the one of finish()."""
    stream, pieces = TextStream(decode, stops, tail), []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


def test_text_comes_out_token_by_token():
    assert streamed(Bytes(b"a", b"b").decode, [0, 1, 0]) == ["a", "b", "a", ""]


def test_a_character_over_tokens_comes_out_whole():
    flag = "\N{REGIONAL INDICATOR SYMBOL LETTER D}".encode()
    decode = Bytes(*(flag[i : i + 1] for i in range(4))).decode
    assert streamed(decode, [0, 1, 2, 3]) == ["", "", "", flag.decode(), ""]


def test_a_combining_mark_is_not_sent_with_its_base_again():
    decode = Bytes(
        b"e", "\N{COMBINING ACUTE ACCENT}".encode(), b"\xf0\x9f\x91\xa9", b"\xe2\x80\x8d"
    )
    pieces = streamed(decode.decode, [0, 1, 2, 3, 2])
    assert pieces == ["e", "\u0301", "\U0001f469", "\u200d", "\U0001f469", ""]


def test_half_a_character_at_the_end_becomes_a_replacement_character():
    assert streamed(Bytes(b"a", b"\xc3").decode, [0, 1]) == ["a", "", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_give_nothing():
    assert streamed(Bytes(b"a", b"").decode, [1, 0, 1, 1, 0, 1]) == ["", "a", "", "", "a", "", ""]


@pytest.mark.parametrize("start", ["\n", " ", "  ", "\n\n", "\t ", " \n \n"])
@pytest.mark.parametrize("length", [1, 19, 20, 21, 60])
def test_an_answer_that_starts_with_whitespace_arrives_whole(start, length):
    text = start + "x" * length
    decode = Bytes(*(bytes([i]) for i in range(128))).decode
    assert "".join(streamed(decode, list(text.encode()), ["yyy"])) == text


def test_a_leading_space_survives_behind_a_prompt():
    decode = Words(" the", " cat", "s").decode
    assert streamed(decode, [1, 2, 0], tail=[0]) == [" cat", "s", " the", ""]
    assert streamed(decode, [1, 2, 0]) == ["cat", "s", " the", ""]


@pytest.mark.parametrize("n", range(24))
def test_a_run_of_broken_bytes_does_not_swallow_the_character_after_it(n):
    decode = Bytes(b"\xff", "é".encode()[:1], "é".encode()[1:], b"a").decode
    for tokens in ([0] * n + [1, 2], [0] * n + [1, 2, 3], [3, *[0] * n, 1, 1, 2, 3], [2] * n):
        assert "".join(streamed(decode, tokens)) == decode(tokens)


LETTERS = Words(*"abcdefgh")


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["cd"], "ab"),
        (["cde"], "ab"),
        (["gh"], "abcdef"),
        (["h"], "abcdefg"),
        (["abcdefgh"], ""),
        (["x", "ef", "bc"], "a"),
        (["hx"], "abcdefgh"),
        (["cdx", "de"], "abc"),
        (["cdef", "cd"], "ab"),
        (["bcdefghi", "fg"], "abcde"),
    ],
)
def test_text_ends_before_the_first_stop_string(stops, text):
    pieces = streamed(LETTERS.decode, range(8), stops)
    assert "".join(pieces) == text


def test_the_beginning_of_a_stop_string_is_held_back_until_it_cannot_become_one():
    decode = Words("a", "b", "ab", "c").decode
    assert streamed(decode, [0, 1, 0, 3], ["abab"]) == ["", "", "", "abac", ""]
    assert streamed(decode, [2, 2, 3], ["ababx"]) == ["", "", "ababc", ""]
    assert streamed(decode, [2, 2, 2], ["ababc"]) == ["", "", "ab", "abab"]


def test_a_stop_string_inside_one_token_is_cut_inside_it():
    assert streamed(Words("one\ntwo").decode, [0], ["\n"]) == ["one", ""]


def test_a_stop_string_in_what_finish_gives_out_is_cut():
    decode = Bytes(b"a", b"\xc3").decode
    stream = TextStream(decode, ["\N{REPLACEMENT CHARACTER}"])
    assert (stream.push(0), stream.push(1)) == ("a", "")
    assert (stream.finish(), stream.stopped) == ("", True)


def test_one_stop_string_may_be_given_alone():
    assert "".join(streamed(LETTERS.decode, range(8), "cd")) == "ab"


@pytest.mark.parametrize("stops", [[""], ["a", ""], ""])
def test_an_empty_stop_string_is_refused(stops):
    with pytest.raises(ValueError) as error:
        TextStream(LETTERS.decode, stops)
    assert str(error.value) == "[stop] A stop string must have at least one character, got ''."


piece = st.one_of(
    st.binary(max_size=4),
    st.sampled_from([bytes([b]) for b in "é€😀\u0301 ".encode()]),
    st.text(max_size=4).map(str.encode),
    st.sampled_from([b"a", b"b", b" ", b"\n", b"ab"]),
)


@settings(max_examples=250, deadline=None)
@given(data=st.data(), vocabulary=st.lists(piece, min_size=1, max_size=8))
def test_the_joined_stream_is_the_text_decoded_at_once(data, vocabulary):
    tokens = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=40))
    decode = Bytes(*vocabulary).decode
    assert "".join(streamed(decode, tokens)) == decode(tokens)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), whole=st.sets(st.characters(min_codepoint=0x80), max_size=5))
def test_the_joined_stream_of_byte_fallback_is_the_text(text, whole):
    """Characters are one token if the vocabulary has them, else one token a byte."""
    pieces: list[bytes] = []
    for letter in text:
        piece = letter.encode()
        known = letter in whole or len(piece) == 1
        pieces += [piece] if known else [piece[i : i + 1] for i in range(len(piece))]
    decode = ByteFallback(*pieces).decode
    assert "".join(streamed(decode, range(len(pieces)))) == text


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.text("ab é", min_size=1, max_size=4), min_size=1, max_size=5),
    picks=st.lists(st.integers(0, 4), max_size=25),
    stops=st.lists(st.text("ab é", min_size=1, max_size=5), max_size=3),
)
def test_the_stream_ends_at_the_token_that_completes_a_stop_string(words, picks, stops):
    decode = Bytes(*(word.encode() for word in words)).decode
    tokens = [pick % len(words) for pick in picks]
    want = decode(tokens)
    for n in range(len(tokens) + 1):
        places = [place for stop in stops if (place := decode(tokens[:n]).find(stop)) >= 0]
        if places:
            want = decode(tokens)[: min(places)]
            break
    assert "".join(streamed(decode, tokens, stops)) == want


@pytest.mark.parametrize("piece", [b"\x80", b""], ids=["bytes of no character", "no text"])
def test_tokens_without_text_by_the_thousand_are_decoded_a_few_at_a_time(piece):
    """Such a run held its row, and all rows beside it, for minutes."""
    words, n_decoded = Bytes(piece, "é".encode()), 0

    def decode(ids):
        nonlocal n_decoded
        n_decoded += len(ids)
        return words.decode(ids)

    text = "".join(streamed(decode, [0] * 2000 + [1]))
    assert text == words.decode([0] * 2000 + [1]) and n_decoded < 100_000


@settings(max_examples=500, deadline=None)
@given(text=st.lists(st.sampled_from(["é", "😀", "€", "a", "ab "]), max_size=12), data=st.data())
def test_the_joined_stream_of_broken_bytes_is_the_text(text, data):
    pieces = [letter.encode() for letter in text]
    for i in range(len(pieces)):
        if data.draw(st.booleans()):
            pieces[i] = data.draw(st.sampled_from([pieces[i][:-1], b"\x80\x80", b"\xf0\x9f"]))
    single = [bytes([b]) for b in b"".join(pieces)]
    decode = Bytes(*single).decode
    tokens = range(len(single))
    assert "".join(streamed(decode, tokens)) == decode(tokens)
