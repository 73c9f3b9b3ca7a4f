"""Every published packaging of a DSpark head as a tiny checkpoint, and what it means.

Each layout gives the files' content and, apart from it, the tensors and the `Spec` that the
reference computes with.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .checkpoints import (
    DEPTH,
    HIDDEN,
    RANK,
    TAPS,
    VOCAB,
    Tensors,
    backbone_tensors,
    config,
    markov_tensors,
    own_ends,
    reduced_vocab,
)
from .nvfp4 import as_nvfp4
from .reference import Spec, causal_view, window_view


@dataclass(frozen=True)
class Layout:
    """A packaging of a head.

    Attributes:
        config: config.json.
        tensors: What the reference computes with.
        spec: What the head is.
        stored: What the files hold, where it differs from `tensors`.
        packaging: What the reader must recognise.
        n_shards: Number of weight files.
    """

    config: dict[str, Any]
    tensors: Tensors
    spec: Spec
    packaging: str
    stored: Tensors | None = None
    n_shards: int = 1


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def dspark(**extra: Any) -> dict[str, Any]:
    """Keys of a DeepSpec head."""
    return config(
        **{
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 5,
            "mask_token_id": 3,
            "target_layer_ids": list(TAPS),
            "num_target_layers": DEPTH,
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "layer_types": ["full_attention"] * 2,
            **extra,
        }
    )


def deepspec_own_ends() -> Layout:
    r = rng()
    return Layout(
        dspark(), backbone_tensors(r) | markov_tensors(r) | own_ends(r), Spec(), "deepspec"
    )


def deepspec_sharded() -> Layout:
    r = rng()
    tensors = backbone_tensors(r) | markov_tensors(r)
    return Layout(dspark(), tensors, Spec(), "deepspec", n_shards=3)


def deepspec_dflash_block() -> Layout:
    """Rank 0, no confidence head, own ends: DFlash in the DSpark layout; the anchor predicts."""
    r = rng()
    tensors = backbone_tensors(r) | own_ends(r)
    spec = Spec(markov=None)
    return Layout(dspark(markov_rank=0, enable_confidence_head=False), tensors, spec, "deepspec")


def deepspec_dflash_by_name() -> Layout:
    """The same under another name and without a word about Markov: its own ends tell."""
    layout = deepspec_dflash_block()
    keys = {k: v for k, v in layout.config.items() if not k.startswith(("markov", "conf"))}
    keys["architectures"] = ["Qwen3DFlashModel"]
    return Layout(keys, layout.tensors, layout.spec, "deepspec")


def stock_with_inherited_noise() -> Layout:
    """A head of a Qwen3.5 target: gate, partial rotation, window and scaling are the target's."""
    r = rng()
    noise = {
        "model_type": "qwen3_5_text",
        "partial_rotary_factor": 0.25,
        "attn_output_gate": True,
        "mrope_section": [11, 11, 10],
        "sliding_window": 3,
        "linear_num_key_heads": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    }
    tensors = backbone_tensors(r) | markov_tensors(r)
    return Layout(dspark(**noise), tensors, Spec(theta=1e7), "deepspec")


def full_vocabulary_named_twice() -> Layout:
    """MiniCPM5: draft_vocab_size equals vocab_size, which means no reduction."""
    r = rng()
    tensors = backbone_tensors(r) | markov_tensors(r)
    return Layout(dspark(draft_vocab_size=VOCAB), tensors, Spec(), "deepspec")


def labelled_dflash() -> Layout:
    """A fork names the DFlash architecture; its Markov rank says what it is."""
    r = rng()
    tensors = backbone_tensors(r) | markov_tensors(r)
    return Layout(dspark(architectures=["DFlashDraftModel"]), tensors, Spec(), "deepspec")


def prefixed() -> Layout:
    """ "model." before the backbone, "logit_head." before the two heads."""
    r = rng()
    body, heads = backbone_tensors(r), markov_tensors(r)
    stored = {f"model.{k}": v for k, v in body.items()}
    stored |= {f"logit_head.{k}": v for k, v in heads.items()}
    stored["verifier_norm.weight"] = np.ones(HIDDEN)
    return Layout(dspark(), body | heads, Spec(), "deepspec", stored)


def gated_markov() -> Layout:
    r = rng()
    tensors = backbone_tensors(r) | markov_tensors(r, "gated")
    return Layout(dspark(markov_head_type="gated"), tensors, Spec(markov="gated"), "deepspec")


def recurrent_markov() -> Layout:
    r = rng()
    tensors = backbone_tensors(r) | markov_tensors(r, "rnn")
    return Layout(dspark(markov_head_type="rnn"), tensors, Spec(markov="rnn"), "deepspec")


def gemma4(*, own: bool, k_eq_v: bool) -> Layout:
    r = rng()
    keys = {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "final_logit_softcapping": 4.0,
        "attention_k_eq_v": k_eq_v,
        "num_global_key_value_heads": 2,
        "global_head_dim": 16,
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6},
    }
    tensors = backbone_tensors(r, gemma=True, k_eq_v=k_eq_v) | markov_tensors(r)
    if own:
        tensors |= own_ends(r)
    # sqrt(32) = 5.65685 rounds to 5.65625 in bf16.
    spec = Spec(gemma=True, gemma_pairs=2, embed_scale=5.65625, softcap=4.0 if own else None)
    return Layout(dspark(**keys), tensors, spec, "deepspec")


def bonsai() -> Layout:
    """The GGUF head repacked one to one: log-SNR conditioning, block of 4."""
    r = rng()
    tensors = backbone_tensors(r) | markov_tensors(r) | own_ends(r)
    for name, shape in (("fc1", (HIDDEN, 128)), ("fc2", (HIDDEN, HIDDEN))):
        tensors[f"log_snr_embed.{name}.weight"] = r.normal(0, 0.2, shape)
        tensors[f"log_snr_embed.{name}.bias"] = r.normal(size=HIDDEN)
    keys = {"log_snr_conditioning": True, "min_log_snr": -9, "max_log_snr": 9, "block_size": 4}
    return Layout(dspark(**keys), tensors, Spec(block=4, snr=(-9, 9)), "bonsai")


def specforge() -> Layout:
    """Nested settings, no ends, and a YaRN scaling that is real."""
    r = rng()
    nested = {
        "projector_type": "dspark",
        "target_layer_ids": list(TAPS),
        "mask_token_id": 3,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "attention_mode": "gqa",
    }
    yarn = {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    }
    keys = config(
        architectures=["DSparkDraftModel"],
        auto_map={"AutoModel": "modeling.DSparkDraftModel"},
        block_size=5,
        num_target_layers=DEPTH,
        dflash_config=nested,
        rope_parameters=yarn,
    )
    tensors = backbone_tensors(r) | markov_tensors(r, confidence="hidden")
    gain = 0.1 * np.log(32) + 1
    spec = Spec(
        frequencies=yarn_frequencies(16, 1e4, 32.0, 64),
        rope_gain=gain,
        confidence_with_markov=False,
    )
    return Layout(keys, tensors, spec, "specforge")


def yarn_frequencies(dims: int, theta: float, factor: float, original: int) -> np.ndarray:
    """Inverse frequencies after the paper: interpolated, kept, and a ramp between."""
    plain = theta ** (-2 * np.arange(dims // 2) / dims)

    def index(rotations: float) -> float:
        return dims * np.log(original / (rotations * 2 * np.pi)) / (2 * np.log(theta))

    low, high = max(np.floor(index(32)), 0), min(np.ceil(index(1)), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


def lfm2() -> Layout:
    """Interleaved rotation; nested settings without a projector type; 5 rows, 5 drafts."""
    r = rng()
    nested = {
        "mask_token_id": 3,
        "target_layer_ids": list(TAPS),
        "num_target_layers": DEPTH,
    }
    keys = config(
        architectures=["Lfm2DSparkDraftModel"],
        model_type="lfm2",
        block_size=5,
        markov_rank=RANK,
        rope_is_neox_style=False,
        dflash_config=nested,
    )
    tensors = backbone_tensors(r) | markov_tensors(r)
    return Layout(keys, tensors, Spec(interleaved=True), "lfm2")


def qwen35_fork() -> Layout:
    """Gated queries, norms stored minus one, a quarter of the head rotates."""
    r = rng()
    keys = dspark(
        architectures=["Qwen35DSparkModel"],
        model_type="qwen3_5",
        enable_qwen35_gated_q_proj=True,
        partial_rotary_factor=0.25,
        confidence_temperatures=[2.0, 0.5],
    )
    tensors = backbone_tensors(r, gated=True, norm_shift=1.0) | markov_tensors(r)
    return Layout(
        keys,
        tensors,
        Spec(gated=True, norm_shift=1.0, rope_dims=4, temperatures=(2.0, 0.5)),
        "qwen3.5 fork",
    )


def nemotron(*, packed: bool) -> Layout:
    """Causal window, sinks, the anchor does not predict, own table, target's head; NVFP4."""
    r = rng()
    keys = dspark(
        dflash_query_causal=True,
        sliding_window=6,
        attention_sink_bias=True,
        sample_from_anchor=False,
        has_lm_head=False,
    )
    tensors = backbone_tensors(r, sinks=True) | markov_tensors(r) | own_ends(r, head=False)
    spec = Spec(start=1, sinks=True, views=(window_view(6, causal=True),) * 2)
    if not packed:
        return Layout(keys, tensors, spec, "deepspec")
    tensors, stored = as_nvfp4(tensors)
    return Layout(keys, tensors, spec, "deepspec", stored)


def swa_by_nested_keys() -> Layout:
    """The other spelling of a causal window."""
    r = rng()
    nested = {"causal": True, "use_swa": True, "swa_window_size": 6}
    tensors = backbone_tensors(r) | markov_tensors(r)
    spec = Spec(views=(window_view(6, causal=True),) * 2)
    return Layout(dspark(dflash_config=nested), tensors, spec, "deepspec")


def causal_without_window() -> Layout:
    r = rng()
    tensors = backbone_tensors(r, bias=True) | markov_tensors(r)
    spec = Spec(views=(causal_view,) * 2)
    return Layout(dspark(dflash_query_causal=True), tensors, spec, "deepspec")


def speculators(name: str, **extra: Any) -> dict[str, Any]:
    """The vLLM schema: taps counted by the state entering a layer."""
    backbone = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        **extra.pop("backbone", {}),
    }
    tokens = extra.pop("speculative_tokens")
    return {
        "speculators_model_type": name,
        "architectures": ["DSparkSpeculator"],
        "speculators_config": {
            "algorithm": name,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": tokens, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": "some/target"},
        },
        "transformer_layer_config": backbone,
        "aux_hidden_state_layer_ids": [t + 1 for t in TAPS],
        "block_size": 5,
        "mask_token_id": 3,
        "draft_vocab_size": VOCAB,
        **extra,
    }


def speculators_reduced() -> Layout:
    """Causal window on every layer, 24 of 40 tokens, the anchor predicts."""
    r = rng()
    keys = speculators(
        "dspark",
        speculative_tokens=5,
        draft_vocab_size=24,
        markov_rank=RANK,
        sliding_window_non_causal=False,
        backbone={
            "layer_types": ["sliding_attention"] * 2,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    )
    tensors = backbone_tensors(r) | markov_tensors(r, n_draft=24)
    tensors |= own_ends(r, 24, embed=False) | {"d2t": reduced_vocab(r, 24)}
    stored = tensors | {"t2d": np.ones(VOCAB, dtype=bool)}
    spec = Spec(views=(window_view(6, causal=True),) * 2)
    return Layout(keys, tensors, spec, "speculators", stored)


def speculators_anchor_dropped() -> Layout:
    """Four drafts from five rows, both ways, full attention."""
    r = rng()
    keys = speculators("dspark", speculative_tokens=4, markov_rank=RANK)
    tensors = backbone_tensors(r) | markov_tensors(r)
    return Layout(keys, tensors, Spec(start=1), "speculators")


def speculators_window_both_ways() -> Layout:
    """One sliding layer that looks both ways, one full layer."""
    r = rng()
    keys = speculators(
        "dspark",
        speculative_tokens=5,
        sliding_window_non_causal=True,
        backbone={
            "layer_types": ["sliding_attention", "full_attention"],
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    )
    tensors = backbone_tensors(r) | markov_tensors(r)
    spec = Spec(views=(window_view(6, causal=False), Spec().views[1]))
    return Layout(keys, tensors, spec, "speculators")


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "deepspec, own ends": deepspec_own_ends,
    "deepspec, three shards": deepspec_sharded,
    "deepspec, rank 0": deepspec_dflash_block,
    "deepspec, dflash by name": deepspec_dflash_by_name,
    "deepspec, inherited noise": stock_with_inherited_noise,
    "deepspec, full vocabulary named twice": full_vocabulary_named_twice,
    "deepspec, labelled dflash": labelled_dflash,
    "deepspec, prefixes": prefixed,
    "deepspec, gated markov": gated_markov,
    "deepspec, recurrent markov": recurrent_markov,
    "deepspec, causal with biases": causal_without_window,
    "deepspec, nested window": swa_by_nested_keys,
    "gemma4, own ends": lambda: gemma4(own=True, k_eq_v=True),
    "gemma4, borrowed ends": lambda: gemma4(own=False, k_eq_v=False),
    "bonsai": bonsai,
    "specforge": specforge,
    "lfm2": lfm2,
    "qwen3.5 fork": qwen35_fork,
    "nemotron": lambda: nemotron(packed=False),
    "nemotron, nvfp4": lambda: nemotron(packed=True),
    "speculators, reduced": speculators_reduced,
    "speculators, anchor dropped": speculators_anchor_dropped,
    "speculators, window both ways": speculators_window_both_ways,
}
