"""Speculative drafters: Bonsai's DSpark files, llama.cpp's `dflash` and `eagle3`.

The output is the layout in which the drafters' authors publish them, with taps as 0-based layers
whose output is read. Row orders and norms are those of the originals, but for EAGLE-3's rotary
rows. Knows nothing about targets.

References:
    DFlash, arXiv 2602.06036; EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

from dataclasses import replace

from spec_convert.config import Config, base_config, rope_scaling
from spec_convert.errors import ConvertError
from spec_convert.facts import Facts
from spec_convert.families.llama import half_split_rows, llama3_scaling
from spec_convert.families.tables import DENSE, QK_NORMS
from spec_convert.names import Architecture, Change, Shape, Slot

_LAYER = DENSE | QK_NORMS
_BONSAI_TOP = {
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "output_norm": "norm",
    "dspark.fc": "fc",
    "dspark.hidden_norm": "hidden_norm",
    "dspark.markov_head_a": "markov_head.markov_w1",
    "dspark.markov_head_b": "markov_head.markov_w2",
    "dspark.confidence_head": "confidence_head.proj",
    "dspark.log_snr_fc1": "log_snr_embed.fc1",
    "dspark.log_snr_fc2": "log_snr_embed.fc2",
}
_DFLASH_TOP = {
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "output_norm": "norm",
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
    "log_snr_fc1": "log_snr_embed.fc1",
    "log_snr_fc2": "log_snr_embed.fc2",
    "d2t": "d2t",
    "selector_hidden": "candidate_selector.hidden_projection",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
}
_DFLASH_LAYER = _LAYER | {
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_base.weight": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_base.weight": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}
_PLAIN = ("confidence_head.", "conf_proj.", "log_snr_fc")
_EAGLE3_TOP = {
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "output_norm": "norm",
    "fc": "fc",
    "d2t": "d2t",
}
_EAGLE3_LAYER = DENSE | {"attn_norm_2": "hidden_norm"}


def _slot(slot: Slot, part: str, facts: Facts) -> Slot:
    part = part.removeprefix("dspark.")
    if part == "d2t":
        return replace(slot, change=Change.IDS_TO_OFFSETS, packed=False)
    if part in ("confidence_head.weight", "conf_proj.weight"):
        return replace(slot, shape=Shape.ROW, packed=False)
    if part.startswith(_PLAIN):
        return replace(slot, packed=False)
    return slot


def _eagle3_slot(slot: Slot, part: str, facts: Facts) -> Slot:
    # One layer only, published as `midlayer`.
    slot = replace(slot, name=slot.name.replace("midlayer.0.", "midlayer."))
    return half_split_rows(_slot(slot, part, facts), part, facts)


def _backbone(facts: Facts, architecture: str) -> Config:
    """Keys of the transformer."""
    config = base_config(facts, "qwen3", architecture, vocab=_vocabulary(facts))
    theta = config.pop("rope_theta")
    scaling = rope_scaling(facts).get("rope_scaling", {"rope_type": "default"})
    config.pop("rope_scaling", None)
    return config | {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in facts.shapes,
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_parameters": {**scaling, "rope_theta": theta},
    }


def _vocabulary(facts: Facts) -> Config:
    """Target vocabulary: rows of a table, else the tokeniser's; unstated where neither exists."""
    for name in ("token_embd.weight", "dspark.markov_head_a.weight", "markov_w1.weight"):
        if name in facts.shapes:
            return {"vocab_size": facts.shapes[name][0]}
    n_tokens = len(facts.metadata.texts("tokenizer.ggml.tokens"))
    return {"vocab_size": n_tokens} if n_tokens else {}


def _log_snr(facts: Facts, prefix: str = "") -> Config:
    if not facts.metadata.flag(facts.key(f"{prefix}log_snr_conditioning"), False):
        return {}
    return {
        "log_snr_conditioning": True,
        "min_log_snr": facts.number(f"{prefix}min_log_snr"),
        "max_log_snr": facts.number(f"{prefix}max_log_snr"),
    }


def _markov(facts: Facts, prefix: str, tensor: str, confidence: str) -> Config:
    table = facts.shapes.get(tensor)
    return {
        "markov_rank": table[-1] if table else facts.integer(f"{prefix}markov_rank", 0),
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence in facts.shapes,
        "confidence_head_with_markov": facts.metadata.flag(
            facts.key(f"{prefix}confidence_head_with_markov"), True
        ),
    }


def _bonsai(facts: Facts) -> Config:
    """The legacy `dspark` files: settings under a doubled prefix, taps as they are."""
    taps = facts.metadata.integers("dspark.dspark.target_layers")
    mask = facts.integer("dspark.mask_token_id")
    if not taps:
        # Forks write these keys once, and count taps from the embedding.
        raise ConvertError(
            '[config] The file must hold "dspark.dspark.target_layers", which is missing. '
            "Use a file in the layout of the first Bonsai release, or a `dflash` file."
        )
    return {
        **_backbone(facts, "Qwen3DSparkModel"),
        "block_size": facts.integer("dspark.block_size"),
        "mask_token_id": mask,
        "target_layer_ids": taps,
        **_markov(
            facts,
            "dspark.",
            "dspark.markov_head_a.weight",
            "dspark.confidence_head.weight",
        ),
        **_log_snr(facts, "dspark."),
    }


def _taps(facts: Facts) -> list[int]:
    """0-based layers whose output is tapped; the file names the layer that the state enters."""
    stated = facts.metadata.integers(facts.key("target_layers"))
    # Early files state outputs already; they also carry the mask token under their own prefix.
    shift = 0 if facts.key("mask_token_id") in facts.metadata else 1
    if not stated or min(stated) < shift:
        raise ConvertError(
            f'[config] "{facts.key("target_layers")}" must list layers from {shift}, '
            f"got {stated}. Use a file written by a current converter."
        )
    return [layer - shift for layer in stated]


def _mask_token(facts: Facts) -> int:
    if facts.key("mask_token_id") in facts.metadata:
        return facts.integer("mask_token_id")
    return facts.metadata.integer("tokenizer.ggml.mask_token_id")


def _layer_views(facts: Facts) -> Config:
    window = facts.integer("attention.sliding_window", 0)
    stated = facts.metadata.flags(facts.key("attention.sliding_window_pattern"))
    sliding = stated[: facts.n_layers] if stated else [bool(window)] * facts.n_layers
    views: Config = {
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in sliding],
        "is_causal": facts.metadata.flag(facts.key("attention.causal"), False),
    }
    return views | ({"sliding_window": window} if window else {})


def _dflash(facts: Facts) -> Config:
    """One architecture name for three families, told apart by their tensors."""
    shared = {"block_size": facts.integer("block_size"), **_layer_views(facts)}
    taps = {"mask_token_id": _mask_token(facts), "target_layer_ids": _taps(facts)}
    if "markov_w1.weight" in facts.shapes:
        first = 0 if facts.metadata.flag(facts.key("sample_from_anchor"), True) else 1
        return {
            **_backbone(facts, "Qwen3DSparkModel"),
            **shared,
            **taps,
            "sample_from_anchor": first == 0,
            **_markov(facts, "", "markov_w1.weight", "conf_proj.weight"),
            **_log_snr(facts),
        }
    if "selector_hidden.weight" not in facts.shapes:
        nested = taps | _output_transform(facts)
        return {**_backbone(facts, "DFlashDraftModel"), **shared, "dflash_config": nested}
    nested = taps | _output_transform(facts)
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        nested[name] = facts.integer(name)
    return {**_backbone(facts, "DFlash2DraftModel"), **shared, "dflash_config": nested}


def _output_transform(facts: Facts) -> Config:
    multiplier = facts.number("logit_scale", 1.0)
    softcap = facts.number("final_logit_softcapping", 0.0)
    transform: Config = {"output_multiplier": multiplier} if multiplier != 1.0 else {}
    return transform | ({"final_logit_softcapping": softcap} if softcap else {})


def _check_draft_vocabulary(facts: Facts, n_draft: int, n_vocab: int) -> None:
    """A reduced vocabulary needs a map to the target's, one target id for each draft id."""
    if "d2t" not in facts.shapes:
        if n_vocab and n_draft != n_vocab:
            raise ConvertError(
                f"[config] A draft vocabulary of {n_draft} beside {n_vocab} target tokens needs "
                'the tensor "d2t", which is missing. Use a complete export of the drafter.'
            )
        return
    ids = facts.vector("d2t")
    if len(ids) != n_draft or len(set(ids)) != len(ids):
        raise ConvertError(
            f'[config] "d2t" must name {n_draft} different target tokens, got {len(set(ids))} of '
            f"{len(ids)}. Use a complete export of the drafter."
        )
    if min(ids) < 0 or (n_vocab and max(ids) >= n_vocab):
        raise ConvertError(
            f'[config] "d2t" must name tokens 0 to {n_vocab - 1}, got {min(ids):.0f} to '
            f"{max(ids):.0f}. Use the drafter made for this vocabulary."
        )


def _eagle3(facts: Facts) -> Config:
    taps = facts.metadata.integers("eagle3.extract_layers")
    draft_vocab = facts.shapes.get("output.weight", (0,))[0]
    n_vocab = len(facts.metadata.texts("tokenizer.ggml.tokens"))
    _check_draft_vocabulary(facts, draft_vocab or n_vocab, n_vocab)
    backbone = _backbone(facts, "LlamaForCausalLMEagle3")
    return {
        **backbone,
        "model_type": "llama",
        "vocab_size": n_vocab or draft_vocab,
        "draft_vocab_size": draft_vocab or n_vocab,
        "target_hidden_size": facts.integer("target_hidden_size"),
        "norm_before_residual": facts.metadata.flag("eagle3.norm_before_residual", False),
        **llama3_scaling(facts, backbone["head_dim"], backbone["rope_theta"]),
        # Both count the layer that the state enters, as the published heads do.
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": taps},
    }


BONSAI = Architecture(
    "dspark", _BONSAI_TOP, _LAYER, config=_bonsai, adjust=_slot, layers="layers", drafter=True
)
DFLASH = replace(BONSAI, name="dflash", top=_DFLASH_TOP, layer=_DFLASH_LAYER, config=_dflash)
EAGLE3 = Architecture(
    "eagle3",
    _EAGLE3_TOP,
    _EAGLE3_LAYER,
    config=_eagle3,
    adjust=_eagle3_slot,
    layers="midlayer",
    drafter=True,
    dropped=frozenset({"rope_freqs.weight"}),
)
