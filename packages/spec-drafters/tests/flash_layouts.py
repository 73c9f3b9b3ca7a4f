"""Every published packaging of DFlash and DFlash 2 heads as a tiny checkpoint."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .checkpoints import (
    DEPTH,
    HIDDEN,
    TAPS,
    VOCAB,
    Tensors,
    backbone_tensors,
    config,
    own_ends,
    reduced_vocab,
)
from .layouts import Layout, rng, speculators
from .reference import Spec, causal_view, full_view, window_view

FLASH = Spec(start=1, markov=None)
WINDOW = 6


def dflash(nested: dict[str, Any] | None = None, **extra: Any) -> dict[str, Any]:
    """Keys of a z-lab head."""
    return config(
        **{
            "architectures": ["DFlashDraftModel"],
            "block_size": 5,
            "num_target_layers": DEPTH,
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": list(TAPS), **(nested or {})},
            **extra,
        }
    )


def zlab() -> Layout:
    return Layout(dflash(), backbone_tensors(rng()), FLASH, "z-lab")


def all_keys_nested() -> Layout:
    """The block size may sit beside the taps; a stale top-level one loses."""
    nested = {"block_size": 4, "num_target_layers": DEPTH}
    keys = dflash(nested, block_size=16)
    return Layout(keys, backbone_tensors(rng()), Spec(start=1, markov=None, block=4), "z-lab")


def all_keys_on_top() -> Layout:
    keys = dflash(mask_token_id=3, target_layer_ids=list(TAPS))
    del keys["dflash_config"]
    return Layout(keys, backbone_tensors(rng()), FLASH, "z-lab")


def taps_not_listed() -> Layout:
    """Two draft layers on six target layers: round(1 + i (6 - 4) / 1) = 1 and 3."""
    keys = dflash()
    del keys["dflash_config"]["target_layer_ids"]
    return Layout(keys, backbone_tensors(rng()), FLASH, "z-lab")


def sliding_then_full() -> Layout:
    """Nothing is said about causality: sliding layers are causal, full layers are not."""
    keys = dflash(layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW)
    views = (window_view(WINDOW, causal=True), full_view)
    spec = Spec(start=1, markov=None, views=views)
    return Layout(keys, backbone_tensors(rng()), spec, "z-lab")


def sliding_both_ways() -> Layout:
    keys = dflash(layer_types=["sliding_attention"] * 2, sliding_window=WINDOW, is_causal=False)
    spec = Spec(start=1, markov=None, views=(window_view(WINDOW, causal=False),) * 2)
    return Layout(keys, backbone_tensors(rng()), spec, "z-lab")


def full_and_causal() -> Layout:
    spec = Spec(start=1, markov=None, views=(causal_view,) * 2)
    return Layout(dflash(is_causal=True), backbone_tensors(rng()), spec, "z-lab")


def output_transform() -> Layout:
    """Multiplier before softcap, embeddings scaled."""
    nested = {
        "output_multiplier": 0.7,
        "final_logit_softcapping": 5.0,
        "input_embedding_scale": 1.5,
    }
    spec = Spec(start=1, markov=None, multiplier=0.7, softcap=5.0, embed_scale=1.5)
    return Layout(dflash(nested), backbone_tensors(rng()), spec, "z-lab")


def muse_names() -> Layout:
    tensors = backbone_tensors(rng())
    stored = dict(tensors)
    stored["encoder.fc.weight"] = stored.pop("fc.weight")
    stored["encoder.output_norm_enc.weight"] = stored.pop("hidden_norm.weight")
    return Layout(dflash(), tensors, FLASH, "z-lab", stored)


def speculators_reduced() -> Layout:
    """Own table, 24 of 40 tokens, five rows for four drafts."""
    r = rng()
    keys = speculators("dflash", speculative_tokens=4, draft_vocab_size=24)
    tensors = backbone_tensors(r) | own_ends(r, 24) | {"d2t": reduced_vocab(r, 24)}
    stored = tensors | {"t2d": np.ones(VOCAB, dtype=bool)}
    return Layout(keys, tensors, FLASH, "speculators", stored)


def flash2_tensors(r: np.random.Generator, n_taps: int = 2, group: int = 16) -> Tensors:
    w = backbone_tensors(r)
    for i in range(2):
        for name in ("attention_conv", "mlp_conv"):
            base = np.zeros((2, n_taps, HIDDEN))
            base[:, 0] = 1
            n_out = 2 * n_taps * (HIDDEN // group)
            w[f"layers.{i}.{name}.base_kernel"] = base + r.normal(0, 0.2, base.shape)
            w[f"layers.{i}.{name}.kernel_projection.weight"] = r.normal(0, 0.1, (n_out, HIDDEN))
    w["candidate_selector.predecessor_codebook"] = r.normal(size=(VOCAB, 8))
    w["candidate_selector.successor_codebook"] = r.normal(size=(VOCAB, 8))
    w["candidate_selector.hidden_projection.weight"] = r.normal(0, 0.2, (8, HIDDEN))
    return w


def flash2(n_taps: int = 2, **nested: Any) -> Layout:
    """All layers slide and look both ways."""
    keys = dflash(
        {
            "conv_kernel_size": n_taps,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": 6,
            **nested,
        },
        architectures=["DFlash2DraftModel"],
        layer_types=["sliding_attention"] * 2,
        sliding_window=WINDOW,
        is_causal=False,
    )
    spec = Spec(
        start=1,
        markov=None,
        views=(window_view(WINDOW, causal=False),) * 2,
        conv_group=16,
        top_k=6,
        multiplier=nested.get("output_multiplier", 1.0),
        softcap=nested.get("final_logit_softcapping"),
    )
    return Layout(keys, flash2_tensors(rng(), n_taps), spec, "z-lab")


FLASH_LAYOUTS: dict[str, Callable[[], Layout]] = {
    "z-lab": zlab,
    "keys nested": all_keys_nested,
    "keys on top": all_keys_on_top,
    "taps not listed": taps_not_listed,
    "sliding, then full": sliding_then_full,
    "sliding both ways": sliding_both_ways,
    "full and causal": full_and_causal,
    "output transform": output_transform,
    "muse names": muse_names,
    "speculators, reduced": speculators_reduced,
}
FLASH2_LAYOUTS: dict[str, Callable[[], Layout]] = {
    "dflash2": flash2,
    "dflash2, three taps": lambda: flash2(3),
    "dflash2, output transform": lambda: flash2(output_multiplier=0.7, final_logit_softcapping=5.0),
}
