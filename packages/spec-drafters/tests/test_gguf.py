"""GGUF heads, written with the reference library, against the NumPy forward."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_core import LoadError
from spec_drafters import DFlash2Drafter, DFlashDrafter, DSparkDrafter, load_drafter

from .checkpoints import HIDDEN, Tensors, TinyTarget
from .flash_layouts import FLASH2_LAYOUTS, FLASH_LAYOUTS
from .layouts import LAYOUTS
from .parity import Session

gguf = pytest.importorskip("gguf", reason="the gguf package writes the files")

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
PRISM = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "fc": "dspark.fc",
    "hidden_norm": "dspark.hidden_norm",
    "markov_head.markov_w1": "dspark.markov_head_a",
    "markov_head.markov_w2": "dspark.markov_head_b",
    "confidence_head.proj": "dspark.confidence_head",
    "log_snr_embed.fc1": "dspark.log_snr_fc1",
    "log_snr_embed.fc2": "dspark.log_snr_fc2",
}
LLAMA = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}


def gguf_name(name: str, names: dict[str, str]) -> str:
    base, part = name, ""
    for suffix in (".weight", ".bias"):
        if name.endswith(suffix):
            base, part = name.removesuffix(suffix), suffix
    if base.startswith("layers."):
        _, i, inner = base.split(".", 2)
        return f"blk.{i}.{LAYER[inner]}{part}"
    return names[base] + part


def put(
    path: Path, arch: str, tensors: Tensors, names: dict[str, str], keys: dict[str, Any]
) -> Path:
    writer = gguf.GGUFWriter(str(path), arch)
    common = {
        "block_count": 2,
        "embedding_length": HIDDEN,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    for key, value in (common | keys).items():
        full = key if key.startswith("tokenizer.") else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_array(full, value)
    for name, array in tensors.items():
        if name == "d2t":  # absolute here
            ids = (array + np.arange(len(array))).astype(np.int32)
            writer.add_tensor(name, ids)
            continue
        writer.add_tensor(gguf_name(name, names), array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


PRISM_KEYS = {
    "dspark.block_size": 4,
    "dspark.mask_token_id": 3,
    "dspark.target_layers": [1, 3],  # outputs of layers: the doubled prefix counts so
    "dspark.markov_rank": 8,
    "dspark.confidence_head": True,
    "dspark.log_snr_conditioning": True,
    "dspark.min_log_snr": -9.0,
    "dspark.max_log_snr": 9.0,
}
LLAMA_KEYS = {
    "block_size": 5,
    "target_layers": [2, 4],  # states entering a layer
    "tokenizer.ggml.mask_token_id": 3,
}
SLIDING = {"attention.sliding_window": 6, "attention.sliding_window_pattern": [True, True]}

CASES: dict[str, Any] = {
    "prismml": (LAYOUTS["bonsai"], "dspark", PRISM, PRISM_KEYS, DSparkDrafter),
    "dspark": (LAYOUTS["deepspec, own ends"], "dflash", LLAMA, LLAMA_KEYS, DSparkDrafter),
    "dspark, causal window": (
        LAYOUTS["deepspec, nested window"],
        "dflash",
        LLAMA,
        LLAMA_KEYS | SLIDING | {"attention.causal": True},
        DSparkDrafter,
    ),
    "dspark, anchor dropped": (
        LAYOUTS["speculators, anchor dropped"],
        "dflash",
        LLAMA,
        LLAMA_KEYS | {"sample_from_anchor": False},
        DSparkDrafter,
    ),
    "dflash": (FLASH_LAYOUTS["z-lab"], "dflash", LLAMA, LLAMA_KEYS, DFlashDrafter),
    "dflash, early": (
        FLASH_LAYOUTS["z-lab"],
        "dflash",
        LLAMA,
        {"block_size": 5, "target_layers": [1, 3], "mask_token_id": 3},
        DFlashDrafter,
    ),
    "dflash, reduced": (
        FLASH_LAYOUTS["speculators, reduced"],
        "dflash",
        LLAMA,
        LLAMA_KEYS,
        DFlashDrafter,
    ),
    "dflash2": (
        FLASH2_LAYOUTS["dflash2"],
        "dflash",
        LLAMA,
        LLAMA_KEYS | SLIDING | {"conv_group_size": 16, "selector_top_k": 6},
        DFlash2Drafter,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, tmp_path: Path) -> None:
    make, arch, names, keys, family = CASES[name]
    layout, target = make(), TinyTarget()
    path = put(tmp_path / "head.gguf", arch, layout.tensors, names, keys)
    mode = "dspark" if family is DSparkDrafter else "dflash"
    drafter: Any = load_drafter(f"gguf:{path}", target, mode=mode, bits=16)
    assert type(drafter) is family
    assert drafter.taps == (1, 3)
    session = Session(drafter, target, layout.tensors)
    session.observe(9)
    session.check(layout.spec, n_rounds=2)


def test_a_tied_prismml_head_uses_its_table(tmp_path: Path) -> None:
    layout, target = LAYOUTS["bonsai"](), TinyTarget()
    tensors = {k: v for k, v in layout.tensors.items() if k != "lm_head.weight"}
    path = put(tmp_path / "head.gguf", "dspark", tensors, PRISM, PRISM_KEYS)
    drafter = DSparkDrafter.load(path, target, bits=16)
    session = Session(drafter, target, tensors | {"lm_head.weight": tensors["embed_tokens.weight"]})
    session.observe(9)
    session.check(layout.spec, n_rounds=2)


def test_other_files_are_refused(tmp_path: Path) -> None:
    layout = FLASH_LAYOUTS["z-lab"]()
    path = put(tmp_path / "a.gguf", "llama", layout.tensors, LLAMA, LLAMA_KEYS)
    with pytest.raises(LoadError, match='a "dspark" or "dflash" head, got "llama"'):
        load_drafter(path, TinyTarget())
    names = LLAMA | {"odd": "odd"}
    tensors = layout.tensors | {"odd.weight": np.ones((2, 32))}
    path = put(tmp_path / "b.gguf", "dflash", tensors, names, LLAMA_KEYS)
    with pytest.raises(LoadError, match='must have a known name, got "odd.weight"'):
        load_drafter(path, TinyTarget())
    keys = LLAMA_KEYS | {"target_layers": [0, 2]}
    path = put(tmp_path / "c.gguf", "dflash", layout.tensors, LLAMA, keys)
    with pytest.raises(LoadError, match=r"by their outputs, got \[0, 2\]"):
        load_drafter(path, TinyTarget())
    (tmp_path / "d.gguf").write_bytes(b"GGUF" + b"\xff" * 60)
    with pytest.raises(LoadError, match='"d.gguf" must be a whole GGUF file.*Use the file in bf16'):
        load_drafter(tmp_path / "d.gguf", TinyTarget())
    (tmp_path / "e.gguf").write_bytes(b"<html>not found</html>")
    with pytest.raises(LoadError, match="got an HTML page. Download it again"):
        load_drafter(tmp_path / "e.gguf", TinyTarget())
