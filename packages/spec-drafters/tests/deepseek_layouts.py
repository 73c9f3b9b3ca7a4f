"""Tiny random DeepSeek-V4 and V4.1 checkpoints, byte for byte as the published ones are laid out.

FP8 matrices with E8M0 block scales, FP4 experts two to a byte, BF16 and F32 for the rest, spread
over shards under an index. Codes are drawn, and what they stand for is computed here from the
formats' definitions: nothing of the package takes part.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .nvfp4 import e4m3_value

HIDDEN, VOCAB, DEPTH = 32, 40, 6
HEADS, HEAD_DIM, ROPE, Q_RANK, GROUPS, O_RANK = 6, 64, 16, 32, 2, 32
COPIES, WINDOW, BLOCK, MASK, N_STAGES = 4, 12, 5, 39, 3
INNER, EXPERTS, ACTIVE, DRAFT_EXPERTS, DRAFT_ACTIVE = 32, 6, 2, 5, 3
HASHED = 2  # target layers that route by token (V4)
INDEX_HEADS, INDEX_DIM = 2, 32
RATIOS, KV_SOURCES, INDEX_SOURCES = [0, 2, 1, 1, 1, 0], [1, 2], [1, 2, 3]  # of the target (V4.1)
SIZES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass
class Raw:
    """One tensor as a file holds it."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


@dataclass
class Bundle:
    """A checkpoint: its config, its tensors as stored, and what they stand for."""

    config: dict[str, Any]
    generation: str
    rng: np.random.Generator
    packed: bool = True
    stored: dict[str, Raw] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)

    def plain(self, name: str, value: np.ndarray, kind: str = "BF16") -> None:
        value = np.asarray(value, np.float32)
        if kind == "BF16":
            bits = value.view(np.uint32).astype(np.uint64)
            half = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            data = half.tobytes()
            value = (half.astype(np.uint32) << 16).view(np.float32)
        else:
            data = value.tobytes()
        self.stored[name] = Raw(kind, value.shape, data)
        self.values[name] = value.astype(np.float64)

    def fp8(self, base: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        """E4M3 codes with a power-of-two scale per square block."""
        if not self.packed:
            self.plain(f"{base}.weight", gain * self.normal(n_out, n_in))
            return
        block = 128 if self.generation == "v4" else 32
        sign = self.rng.integers(0, 2, (n_out, n_in)) << 7
        codes = (sign | self.rng.integers(5 << 3, 9 << 3, (n_out, n_in))).astype(np.uint8)
        shape = (-(-n_out // block), -(-n_in // block))
        middle = round(np.log2(gain / (1.2 * np.sqrt(n_in))))
        exponents = middle + self.rng.integers(-1, 2, shape)
        spread = np.repeat(np.repeat(exponents, block, 0), block, 1)[:n_out, :n_in]
        self.stored[f"{base}.weight"] = Raw("F8_E4M3", (n_out, n_in), codes.tobytes())
        self.scale(base, exponents)
        self.values[f"{base}.weight"] = e4m3_value(codes) * 2.0**spread

    def fp4(self, base: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        """E2M1 codes, the first of two in the low half of a byte, with a scale per 32 columns."""
        if not self.packed:
            self.plain(f"{base}.weight", gain * self.normal(n_out, n_in))
            return
        codes = self.rng.integers(0, 16, (n_out, n_in)).astype(np.uint8)
        pairs = (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.int8)
        middle = round(np.log2(gain / (2.9 * np.sqrt(n_in))))
        exponents = middle + self.rng.integers(-1, 2, (n_out, n_in // 32))
        self.stored[f"{base}.weight"] = Raw("I8", (n_out, n_in // 2), pairs.tobytes())
        self.scale(base, exponents)
        self.values[f"{base}.weight"] = _E2M1[codes] * 2.0 ** np.repeat(exponents, 32, 1)

    def scale(self, base: str, exponents: np.ndarray) -> None:
        codes = (exponents + 127).astype(np.uint8)
        self.stored[f"{base}.scale"] = Raw("F8_E8M0", codes.shape, codes.tobytes())

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.normal(0, 1 / np.sqrt(shape[-1]), shape)

    def norm(self, name: str, size: int) -> None:
        self.plain(name, 1 + 0.3 * self.rng.normal(size=size))

    def block(self, p: str, n_experts: int, n_active: int, hashed: bool = False) -> None:
        """A decoder block: a layer of the target, or a draft stage."""
        rng, mixes = self.rng, (2 + COPIES) * COPIES
        a, f = f"{p}.attn", f"{p}.ffn"
        self.fp8(f"{a}.wq_a", Q_RANK, HIDDEN)
        self.norm(f"{a}.q_norm.weight", Q_RANK)
        self.fp8(f"{a}.wq_b", HEADS * HEAD_DIM, Q_RANK, 2.0)
        self.fp8(f"{a}.wkv", HEAD_DIM, HIDDEN)
        self.norm(f"{a}.kv_norm.weight", HEAD_DIM)
        self.fp8(f"{a}.wo_a", GROUPS * O_RANK, HEADS * HEAD_DIM // GROUPS, 2.0)
        self.fp8(f"{a}.wo_b", HIDDEN, GROUPS * O_RANK)
        self.plain(f"{a}.attn_sink", rng.normal(size=HEADS), "F32")
        self.norm(f"{p}.attn_norm.weight", HIDDEN)
        self.norm(f"{p}.ffn_norm.weight", HIDDEN)
        self.plain(f"{f}.gate.weight", 2 * self.normal(n_experts, HIDDEN))
        if hashed:
            table = np.argsort(rng.random((VOCAB, n_experts)))[:, :n_active].astype(np.int64)
            self.stored[f"{f}.gate.tid2eid"] = Raw("I64", table.shape, table.tobytes())
            self.values[f"{f}.gate.tid2eid"] = table
        else:
            self.plain(f"{f}.gate.bias", 0.3 * rng.normal(size=n_experts), "F32")
        if self.generation == "v4.1":
            self.plain(f"{f}.gate.bias_vl", rng.normal(size=n_experts), "F32")
        for e in range(n_experts):
            for part, shape in (("w1", (INNER, HIDDEN)), ("w3", (INNER, HIDDEN))):
                self.fp4(f"{f}.experts.{e}.{part}", *shape, gain=3.0)
            self.fp4(f"{f}.experts.{e}.w2", HIDDEN, INNER)
        for part, shape in (("w1", (INNER, HIDDEN)), ("w3", (INNER, HIDDEN))):
            self.fp8(f"{f}.shared_experts.{part}", *shape, gain=3.0)
        self.fp8(f"{f}.shared_experts.w2", HIDDEN, INNER)
        for side in ("attn", "ffn"):
            self.plain(f"{p}.hc_{side}_fn", self.normal(mixes, COPIES * HIDDEN), "F32")
            self.plain(f"{p}.hc_{side}_base", rng.normal(size=mixes), "F32")
            self.plain(f"{p}.hc_{side}_scale", 0.5 + rng.random(3), "F32")

    def compression(self, a: str, layer: int) -> None:
        """What a V4.1 layer compresses and selects with."""
        if layer in KV_SOURCES:
            self.plain(f"{a}.compressor.wkv.weight", self.normal(HEAD_DIM, HIDDEN))
            if RATIOS[layer] > 1:
                self.plain(f"{a}.compressor.wgate.weight", self.normal(HEAD_DIM, HIDDEN))
            self.norm(f"{a}.compressor.norm.weight", HEAD_DIM)
            self.plain(f"{a}.indexer.wk.weight", self.normal(INDEX_DIM, HEAD_DIM))
            self.norm(f"{a}.indexer.k_norm.weight", INDEX_DIM)
        if layer in INDEX_SOURCES:
            self.fp8(f"{a}.indexer.wq_b", INDEX_HEADS * INDEX_DIM, Q_RANK)
            self.plain(f"{a}.indexer.weights_proj.weight", self.normal(INDEX_HEADS, HIDDEN))

    def collapse(self, p: str) -> None:
        """The learned collapse of the copies (V4)."""
        self.plain(f"{p}hc_head_fn", self.normal(COPIES, COPIES * HIDDEN), "F32")
        self.plain(f"{p}hc_head_base", self.rng.normal(size=COPIES), "F32")
        self.plain(f"{p}hc_head_scale", 0.5 + self.rng.random(1), "F32")


def bundle(
    generation: str = "v4",
    *,
    seed: int = 0,
    packed: bool = True,
    hashed_drafts: bool = False,
    flat: float = 1.0,
    table: float = 6.0,
) -> Bundle:
    """A whole checkpoint: target layers, draft stages, ends.

    Args:
        generation: "v4" or "v4.1".
        seed: Of everything.
        packed: FP8 and FP4 as published; without, all matrices in BF16.
        hashed_drafts: Draft stages route by token too (no published checkpoint does).
        table: Multiplies the embedding table.
        flat: Multiplies the head: below 1 the target is less sure.
    """
    rng, rank = np.random.default_rng(seed), 8
    b = Bundle(config_of(generation), generation, rng, packed)
    v4 = generation == "v4"
    b.plain("embed.weight", table * rng.normal(size=(VOCAB, HIDDEN)))
    b.plain("head.weight", flat * 0.6 * rng.normal(size=(VOCAB, HIDDEN)))
    b.norm("norm.weight", HIDDEN)
    for i in range(DEPTH):
        b.block(f"layers.{i}", EXPERTS, ACTIVE, hashed=v4 and i < HASHED)
        if not v4:
            b.compression(f"layers.{i}.attn", i)
    if v4:
        b.collapse("")
    n, k = (EXPERTS, ACTIVE) if v4 else (DRAFT_EXPERTS, DRAFT_ACTIVE)
    for i in range(N_STAGES):
        b.block(f"mtp.{i}", n, k, hashed=hashed_drafts)
    b.fp8("mtp.0.main_proj", HIDDEN, N_STAGES * HIDDEN)
    b.norm("mtp.0.main_norm.weight", HIDDEN)
    last = f"mtp.{N_STAGES - 1}"
    b.norm(f"{last}.norm.weight", HIDDEN)
    first, second = ("markov_w1", "markov_w2") if v4 else ("embed", "head")
    b.plain(f"{last}.markov_head.{first}.weight", rng.normal(size=(VOCAB, rank)))
    b.plain(f"{last}.markov_head.{second}.weight", rng.normal(size=(VOCAB, rank)))
    b.plain(f"{last}.confidence_head.proj.weight", 0.1 * rng.normal(size=(1, HIDDEN + rank)))
    if v4:
        b.collapse(f"{last}.")
    return b


def config_of(generation: str) -> dict[str, Any]:
    """config.json in Hugging Face's spelling; V4.1 nests the language model."""
    v4 = generation == "v4"
    text: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": DEPTH,
        "num_nextn_predict_layers": 1 if v4 else 3,
        "num_attention_heads": HEADS,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE,
        "q_lora_rank": Q_RANK,
        "o_lora_rank": O_RANK,
        "o_groups": GROUPS,
        "sliding_window": WINDOW,
        "moe_intermediate_size": INNER,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": ACTIVE,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 4.0,
        "hc_mult": COPIES,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "max_position_embeddings": 4096,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 256},
        "dspark_block_size": BLOCK,
        "dspark_noise_token_id": MASK,
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_markov_rank": 8,
    }
    block = 128 if v4 else 32
    quantised = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [block, block],
    }
    if v4:
        extra = {"num_hash_layers": HASHED, "compress_ratios": [0] * (DEPTH + N_STAGES)}
        return {"model_type": "deepseek_v4", **text, **extra, "quantization_config": quantised}
    text |= {
        "gate_temp": 1.25,
        "compress_ratios": RATIOS + [0] * N_STAGES,
        "kv_source_layer_ids": KV_SOURCES,
        "index_source_layer_ids": INDEX_SOURCES,
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 2,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": 6,
        "dspark_n_routed_experts": DRAFT_EXPERTS,
        "dspark_num_experts_per_tok": DRAFT_ACTIVE,
    }
    return {
        "model_type": "deepseek_v41",
        "text_config": text,
        "quantization_config": quantised,
    }


def in_inference_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The same settings as DeepSeek's `inference/config.json` spells them."""
    spelled = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "qk_rope_head_dim": "rope_head_dim",
        "sliding_window": "window_size",
        "moe_intermediate_size": "moe_inter_dim",
        "num_experts_per_tok": "n_activated_experts",
        "scoring_func": "score_func",
        "routed_scaling_factor": "route_scale",
        "rms_norm_eps": "norm_eps",
        "num_nextn_predict_layers": "n_mtp_layers",
    }
    return {spelled.get(key, key): value for key, value in config.items()}


def write_file(path: Path, stored: dict[str, Raw]) -> None:
    """One safetensors file, written by hand: MLX's writer has no FP8 types."""
    header, offset = {}, 0
    for name, raw in stored.items():
        end = offset + len(raw.data)
        header[name] = {"dtype": raw.kind, "shape": raw.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [struct.pack("<Q", len(text)), text, *(raw.data for raw in stored.values())]
    path.write_bytes(b"".join(parts))


def write_bundle(
    folder: Path, b: Bundle, *, n_shards: int = 6, n_draft_shards: int = 2
) -> dict[str, str]:
    """Config, index and shards: drafts in the last ones, and in one that the target shares."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(b.config))
    drafts = [name for name in b.stored if name.startswith("mtp.")]
    others = [name for name in b.stored if not name.startswith("mtp.")]
    n_plain = n_shards - n_draft_shards
    shards: list[Sequence[str]] = [others[i::n_plain] for i in range(n_plain)]
    shards += [drafts[i::n_draft_shards] for i in range(n_draft_shards)]
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{n_shards:05}.safetensors"
        write_file(folder / file, {name: b.stored[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map
