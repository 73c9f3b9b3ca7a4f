"""A tokenizer of bytes with a chat template, which loads at once; the scripts of benchmarks."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def byte_words(tmp_path_factory) -> Path:
    """Its folder: 257 entries, the first of which ends a text."""
    folder = tmp_path_factory.mktemp("words")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {c: i for i, c in enumerate(["<|end|>", *alphabet])}
    raw = Tokenizer(models.BPE(words, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script of benchmarks/ by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        yield importlib.import_module


@pytest.fixture
def run(script, monkeypatch, capsys, tmp_path):
    """Runs a script's main in this process; returns its exit code, or what it says instead, and
    what it printed.
    """
    monkeypatch.setenv("SPEC_CACHE_DIR", str(tmp_path / "cache"))

    def call(name: str, *arguments: object):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *(str(a) for a in arguments)])
        try:
            code = script(name).main()
        except SystemExit as left:
            code = left.code
        return code or 0, capsys.readouterr().out

    return call
