"""A tiny random llama with a byte-level tokenizer, and a target that says what a test wants."""

import functools
import gc
import json
import shutil
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from spec_core import FixedCap, Pair, TargetOutput
from spec_drafters import LookupDrafter
from spec_server import Served, Server, Settings
from spec_targets import load_target
from spec_targets.tiny import build, tiny_config

CONTEXT = 1024
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls %}{% for t in m.tool_calls %}{% set tool_call = t.function %}"
    '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking == false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
_TEXT = [
    "The quick brown fox jumps over the lazy dog. It is a small, bright and quiet morning.",
    'user assistant system {"name": "get_weather", "arguments": {"city": "Paris"}} number string',
    "Name three rivers of the world, and say why each of them is worth a visit in the summer.",
]


def make_tokenizer(folder: Path, marks: list[str] = _MARKS, template: str = TEMPLATE) -> int:
    """Write tokenizer files; returns V."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_TEXT, trainer)
    raw.add_tokens(marks)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
        chat_template=template,
    )
    fast.save_pretrained(folder)
    return len(fast)


@pytest.fixture(scope="session", autouse=True)
def _cheap_clients_and_servers():
    """What every HTTP client and every server's end would do again for hundreds of tests."""
    with pytest.MonkeyPatch.context() as patch:
        # A client reads all certificates, 25 ms; no test speaks TLS.
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        gc.collect()
        gc.freeze()  # a server's end collects garbage: not what was imported
        yield
        gc.unfreeze()


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


def make_model(path: Path, **tokenizer) -> Path:
    """A checkpoint of the tiny llama."""
    vocab_size = make_tokenizer(path, **tokenizer)
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab_size,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config))
    mx.random.seed(3)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = {name: 3 * array for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    return path


def tiny_loader(
    folder: Path, *, drafts: bool = True, wrap=lambda target: target, kv_bits: int | None = None
):
    """A loader of the tiny model, with lookup beside it."""

    def load() -> Served:
        target, tokenizer = load_target(folder, kv_bits=kv_bits)
        drafter = LookupDrafter(min_match=1) if drafts else None
        pair = Pair(wrap(target), drafter, tokenizer)
        mode = "lookup" if drafts else "baseline"
        return Served(
            pair, "tiny", mode, lambda wish: FixedCap(4 if wish is None else wish), "tiny-test"
        )

    return load


@pytest.fixture
def folder_of(folder, tmp_path):
    """Tiny checkpoints of other model types with the same tokenizer: `folder_of("lfm2")`."""

    def make(model_type: str, **fields) -> Path:
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        config = tiny_config(
            model_type, vocab_size=vocab_size, max_position_embeddings=CONTEXT, **fields
        )
        path = tmp_path / model_type
        shutil.copytree(folder, path)
        (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))
        weights = dict(tree_flatten(build(config).parameters()))
        mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
        return path

    return make


@pytest.fixture(scope="session")
def server(folder):
    """One tiny server for the tests that leave no trace."""
    with Server(tiny_loader(folder), Settings(port=0, keep_alive_s=0.2, max_batch=4)) as running:
        yield running


@dataclass(slots=True)
class ScriptCache:
    """Ids so far, and how many of them are the prompt."""

    tokens: list[int] = field(default_factory=list)
    n_prompt: int = 0
    n_open: int = 0

    @property
    def offset(self) -> int:
        return len(self.tokens) - self.n_open

    @property
    def is_open(self) -> bool:
        return self.n_open > 0

    nbytes = 256


class ScriptTarget:
    """Answers a prompt that holds `say:KEY;` with the script of that key, then ends."""

    hidden_size, n_layers, tap_refusal, exact_refusal, context_length = 8, 1, None, None, 4096

    def __init__(self, tokenizer, scripts: dict[str, str], delay_s: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.scripts = scripts
        self.delay_s = delay_s

    def make_cache(self):
        return ScriptCache()

    def prefill(self, tokens, cache, *, taps: Sequence[int] = ()):
        cache.tokens += list(tokens)
        cache.n_prompt += len(tokens)
        return TargetOutput(self._rows(cache, [0]))

    def verify(self, block, cache, *, taps: Sequence[int] = ()):
        first = len(cache.tokens) - cache.n_prompt + 1
        cache.tokens += block.tolist()
        cache.n_open = block.shape[0]
        return TargetOutput(self._rows(cache, range(first, first + block.shape[0])))

    def commit(self, cache, n_keep):
        del cache.tokens[cache.offset + n_keep :]
        cache.n_open = 0

    def embed(self, tokens):
        return mx.zeros((tokens.shape[0], 8))

    def unembed(self, hidden):
        return mx.zeros((hidden.shape[0], self.vocab_size))

    def _rows(self, cache, positions):
        prompt = self.tokenizer.decode(cache.tokens[: cache.n_prompt])
        key = prompt.rsplit("say:", 1)[1].split(";")[0] if "say:" in prompt else ""
        script = self.tokenizer.encode(self.scripts.get(key, ""), add_special_tokens=False)
        rows = mx.zeros((len(list(positions)), self.vocab_size))
        for i, at in enumerate(positions):
            token = script[at] if at < len(script) else self.tokenizer.eos_token_id
            rows[i, token] = 20.0
        return rows


def script_loader(folder: Path, scripts: dict[str, str]):
    """A loader of a target that follows scripts."""

    def load() -> Served:
        _, tokenizer = load_target(folder)
        target = ScriptTarget(tokenizer.wrapper._tokenizer, scripts)
        pair = Pair(target, LookupDrafter(min_match=1), tokenizer)
        return Served(pair, "script", "lookup", lambda wish: FixedCap(4 if wish is None else wish))

    return load


@pytest.fixture(scope="session")
def load_tiny(folder):
    """Loaders of the tiny model, or of another folder: `load_tiny(path=..., drafts=True)`."""
    return lambda path=folder, **settings: tiny_loader(path, **settings)


@pytest.fixture(scope="session")
def load_other(tmp_path_factory):
    """Loaders of the tiny model with another tokenizer: `load_other(marks=, template=)`."""

    def loader(**tokenizer):
        return tiny_loader(make_model(tmp_path_factory.mktemp("other"), **tokenizer))

    return loader


@pytest.fixture(scope="session")
def load_script(folder):
    """Loaders of a target that follows scripts, with the tokenizer of a folder."""
    return lambda scripts, path=folder: script_loader(path, scripts)


@pytest.fixture(scope="session")
def context() -> int:
    return CONTEXT
