"""Answers of gpt-oss in `spec generate` and `spec chat`: no channel runs into another."""

import io
import json
import shutil
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spec_cli import conversation
from spec_core import Round
from spec_core.text import TextStream

MARKS = [
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Let me see."
FINAL = "<|channel|>final<|message|>It is 4, not <5>.<|return|>"
THOUGHT_SHOWN = "<think>\nLet me see."
FINAL_SHOWN = "It is 4, not <5>."


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """The tiny llama with a tokenizer of bytes and gpt-oss's marks."""
    folder = tmp_path_factory.mktemp("channels")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_folder / name, folder / name)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|return|>",
        additional_special_tokens=MARKS,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def says(folder, monkeypatch):
    """Have the model write a text, a token a round; gives the list of prompts it was asked."""
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    prompts = []

    def script(text):
        ids = fast.encode(text, add_special_tokens=False)

        def generate(pair, prompt, **settings):
            prompts.append(fast.decode(prompt))
            stream = TextStream(pair.tokenizer.decode, (), prompt[-4:])
            for at, token in enumerate(ids, 1):
                yield made(stream, token, at == len(ids))

        monkeypatch.setattr("spec_core.generate", generate)
        monkeypatch.setattr(conversation, "generate", generate)
        return prompts

    return script


def made(stream, token, last):
    text = stream.push(token) + (stream.finish() if last else "")
    return Round((token,), text, "plain", 0, 0, "target", 0, 0.01, "stop" if last else None)


SAID = {
    "reasoning, then text": (
        THOUGHT + NEXT + FINAL,
        f"{THOUGHT_SHOWN}\n</think>\n\n{FINAL_SHOWN}",
    ),
    "text alone": (FINAL, FINAL_SHOWN),
    "two thoughts": (
        THOUGHT + NEXT + THOUGHT + NEXT + FINAL,
        f"{THOUGHT_SHOWN}\n\nLet me see.\n</think>\n\n{FINAL_SHOWN}",
    ),
    "a thought after a text": (
        "<|channel|>commentary<|message|>Hm." + NEXT + THOUGHT + NEXT + FINAL,
        f"Hm.\n\n{THOUGHT_SHOWN}\n</think>\n\n{FINAL_SHOWN}",
    ),
    "two texts": ("<|channel|>commentary<|message|>Hm." + NEXT + FINAL, f"Hm.\n\n{FINAL_SHOWN}"),
    "cut in a thought": (THOUGHT, THOUGHT_SHOWN),
    "no channel": ("Just so.", "Just so."),
}


@pytest.mark.parametrize("name", SAID)
def test_generate_shows_reasoning_and_text_apart(spec, folder, says, name):
    text, shown = SAID[name]
    says(text)
    common = ("generate", "Hi", "--model", folder, "--max-draft", 0)
    assert spec(*common, "--no-stats") == (0, shown + "\n", "")
    assert json.loads(spec(*common, "--json")[1])["text"] == shown


def test_a_raw_text_stays_as_it_is(spec, folder, says):
    says(THOUGHT + NEXT + FINAL)
    code, out, _ = spec("generate", "Hi", "--model", folder, "--raw", "--no-stats")
    assert (code, out) == (0, "analysisLet me see.assistantfinalIt is 4, not <5>.\n")


def test_chat_shows_them_apart_and_keeps_the_text_alone(spec, folder, says, monkeypatch):
    text, shown = SAID["reasoning, then text"]
    prompts = says(text)
    monkeypatch.setattr("spec_cli.conversation.Conversation._keep", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nAnd now?\n"))
    code, out, err = spec("chat", "--model", folder, "--max-draft", 0, "--no-stats")
    assert (code, out, err) == (0, 2 * (shown + "\n"), "")
    history = f"<|start|>user<|message|>Hi<|end|><|start|>assistant{FINAL}"
    assert prompts[1].startswith(history.replace("<|return|>", "<|end|>"))
    assert "analysis" not in prompts[1]


def test_a_turn_in_which_nothing_was_said_leaves_no_empty_message(spec, folder, says, monkeypatch):
    prompts = says(THOUGHT)  # the tokens ended in the reasoning
    monkeypatch.setattr("spec_cli.conversation.Conversation._keep", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nAnd now?\n"))
    assert spec("chat", "--model", folder, "--max-draft", 0, "--no-stats")[0] == 0
    assert "final" not in prompts[1] and "Hi" not in prompts[1]
