"""EAGLE-3 in each packaging against the NumPy forward; mistakes would be noticed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_core import LoadError, Sampling, TargetOutput
from spec_core.testing import check_drafter
from spec_drafters import Eagle3Drafter

from .checkpoints import HIDDEN, INNER, VOCAB, Tensors, TinyTarget, config, reduced_vocab, write
from .eagle_reference import EagleSpec, eagle_chain
from .reference import log_softmax

TEMPERATURE = 0.7
N_DRAFT = 24


class DeepTarget(TinyTarget):
    """Deep enough for the default taps: entering layers 2, 4 and 5 of 8."""

    n_layers = 8


@dataclass(frozen=True)
class EagleLayout:
    config: dict[str, Any]
    tensors: Tensors
    spec: EagleSpec
    packaging: str
    taps: tuple[int, ...] = (1, 3, 4)


def tensors(prefix: str, *, n_draft: int, qk_norm: bool = False, gemma: bool = False) -> Tensors:
    r = np.random.default_rng(11)

    def matrix(n_out: int, n_in: int) -> np.ndarray:
        return r.normal(0, 1.5 / np.sqrt(n_in), (n_out, n_in))

    def norm(size: int) -> np.ndarray:
        return 1 + 0.3 * r.normal(size=size)

    w = {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": norm(HIDDEN),
        "lm_head.weight": matrix(n_draft, HIDDEN),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        w[f"{prefix}.{name}.weight"] = norm(HIDDEN)
    for name, shape in {
        "self_attn.q_proj": (64, 2 * HIDDEN),
        "self_attn.k_proj": (32, 2 * HIDDEN),
        "self_attn.v_proj": (32, 2 * HIDDEN),
        "self_attn.o_proj": (HIDDEN, 64),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }.items():
        w[f"{prefix}.{name}.weight"] = matrix(*shape)
    if qk_norm:
        w[f"{prefix}.self_attn.q_norm.weight"] = norm(16)
        w[f"{prefix}.self_attn.k_norm.weight"] = norm(16)
    if gemma:
        del w[f"{prefix}.self_attn.v_proj.weight"]
        w[f"{prefix}.pre_feedforward_layernorm.weight"] = norm(HIDDEN)
        w[f"{prefix}.post_feedforward_layernorm.weight"] = norm(HIDDEN)
    if n_draft < VOCAB:
        w["d2t"] = reduced_vocab(r, n_draft)
    return w


def original(**extra: Any) -> EagleLayout:
    keys = config(
        architectures=["LlamaForCausalLMEagle3"],
        model_type="llama",
        num_hidden_layers=1,
        draft_vocab_size=N_DRAFT,
        rope_theta=1e4,
        **extra,
    )
    return EagleLayout(keys, tensors("midlayer", n_draft=N_DRAFT), EagleSpec(), "eagle")


def original_listed_taps() -> EagleLayout:
    layout = original(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4, 7]})
    return replace(layout, taps=(0, 3, 6))


def original_full_vocabulary() -> EagleLayout:
    """Some exporters write a d2t of zeros even where nothing is reduced."""
    layout = original()
    w = tensors("midlayer", n_draft=VOCAB) | {"d2t": np.zeros(VOCAB, dtype=int)}
    return replace(layout, tensors=w, config=layout.config | {"draft_vocab_size": VOCAB})


def deepspec() -> EagleLayout:
    keys = config(
        architectures=["Qwen3Eagle3Model"],
        num_hidden_layers=1,
        target_layer_ids=[1, 4, 6],
        num_target_layers=8,
        ttt_length=4,
    )
    w = tensors("layers.0", n_draft=VOCAB, qk_norm=True)
    w["embed_tokens.weight"] = np.random.default_rng(3).normal(size=(VOCAB, HIDDEN))
    spec = EagleSpec(prefix="layers.0", theta=1e6)
    return EagleLayout(keys, w, spec, "deepspec", (1, 4, 6))


def deepspec_gemma4() -> EagleLayout:
    layout = deepspec()
    keys = layout.config | {
        "architectures": ["Gemma4Eagle3Model"],
        "model_type": "gemma4_text",
        "final_logit_softcapping": 4.0,
    }
    w = tensors("layers.0", n_draft=VOCAB, qk_norm=True, gemma=True)
    spec = replace(layout.spec, gemma=True, gemma_pairs=2, embed_scale=5.65625, softcap=4.0)
    return replace(layout, config=keys, tensors=w, spec=spec)


def speculators(**extra: Any) -> EagleLayout:
    backbone = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128000,  # converters write this whatever the target has
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        **extra.pop("backbone", {}),
    }
    keys = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        },
        "transformer_layer_config": backbone,
        "draft_vocab_size": N_DRAFT,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": None,
        **extra,
    }
    w = tensors("layers.0", n_draft=N_DRAFT)
    return EagleLayout(keys, w, EagleSpec(prefix="layers.0"), "speculators")


def speculators_norms() -> EagleLayout:
    """The residual from the normed state, one norm before fc, the normed output fed back."""
    layout = speculators(norm_before_residual=True, norm_before_fc=True, norm_output=True)
    w = layout.tensors | {"input_norm.weight": 1 + 0.1 * np.arange(3 * HIDDEN) / HIDDEN}
    spec = replace(layout.spec, norm_before_residual=True, norm_output=True)
    return replace(layout, tensors=w, spec=spec)


def speculators_tap_norms() -> EagleLayout:
    layout = speculators(fc_norm=True)
    norms = {f"fc_norm.{j}.weight": np.linspace(0.5, 1.5 + j, HIDDEN) for j in range(3)}
    return replace(layout, tensors=layout.tensors | norms)


def speculators_sliding() -> EagleLayout:
    backbone = {"layer_types": ["sliding_attention"], "sliding_window": 6}
    layout = speculators(backbone=backbone)
    return replace(layout, spec=replace(layout.spec, window=6))


LAYOUTS = {
    "original": original,
    "original, listed taps": original_listed_taps,
    "original, full vocabulary": original_full_vocabulary,
    "deepspec": deepspec,
    "deepspec, gemma4": deepspec_gemma4,
    "speculators": speculators,
    "speculators, norms": speculators_norms,
    "speculators, tap norms": speculators_tap_norms,
    "speculators, sliding": speculators_sliding,
}


class Session:
    """Committed rows with random taps for a drafter, kept for the reference."""

    def __init__(self, folder: Path, layout: EagleLayout, **options: Any) -> None:
        target = DeepTarget()
        write(folder, layout.config, layout.tensors)
        self.drafter = Eagle3Drafter.load(folder, target, bits=16, **options)
        self.rng = np.random.default_rng(0)
        self.w = layout.tensors
        table = np.array(target.embed(mx.arange(VOCAB))).astype(np.float64)
        self.table = self.w.get("embed_tokens.weight", table)
        ids = np.arange(len(self.w["lm_head.weight"]))
        self.target_ids = ids + self.w["d2t"] if "d2t" in self.w else ids
        self.taps = np.zeros((0, 3 * HIDDEN))
        self.tokens: list[int] = []

    def observe(self, tokens: list[int]) -> None:
        rows = self.rng.normal(size=(len(tokens), 3 * HIDDEN))
        self.taps = np.concatenate([self.taps, rows])
        self.tokens += tokens
        parts = np.split(rows.astype(np.float32), 3, axis=1)
        output = TargetOutput(mx.zeros((len(tokens), 1)), tuple(mx.array(p) for p in parts))
        self.drafter.observe(tokens, output)

    def draft(self, anchor: int, temperature: float, seed: int = 0) -> Any:
        return self.drafter.draft(
            anchor,
            self.drafter.max_draft,
            sampling=Sampling(temperature=temperature),
            key=mx.random.key(seed),
        )

    def distance(self, spec: EagleSpec, anchor: int) -> float:
        """Largest difference of sampled q from the reference, in units of logits."""
        draft = self.draft(anchor, TEMPERATURE)
        tokens = draft.tokens.tolist()
        rows = eagle_chain(
            spec,
            self.w,
            self.table,
            self.taps,
            self.tokens,
            anchor,
            len(tokens),
            lambda i: tokens[i],
        )
        gap = 0.0
        for logits, row in zip(rows, np.array(draft.probs).astype(np.float64), strict=True):
            want, got = log_softmax(logits / TEMPERATURE), row[self.target_ids]
            seen = want > -16
            gap = max(gap, np.abs(np.log(got[seen]) - want[seen]).max() * TEMPERATURE)
        return gap

    def check_greedy(self, spec: EagleSpec, anchor: int) -> None:
        tokens = self.draft(anchor, 0.0).tokens.tolist()
        rows = eagle_chain(
            spec,
            self.w,
            self.table,
            self.taps,
            self.tokens,
            anchor,
            len(tokens),
            lambda i: tokens[i],
        )
        for logits, token in zip(rows, tokens, strict=True):
            assert logits.max() - logits[self.target_ids == token].item() < 1e-4


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_reference_over_several_rounds(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]()
    session = Session(tmp_path, layout)
    assert session.drafter.taps == layout.taps
    assert session.drafter.config.packaging == layout.packaging
    session.observe([4, 9, 9, 1, 30])
    session.observe([7, 2])
    for n in range(4):
        anchor = (5 * n + 3) % VOCAB
        session.check_greedy(layout.spec, anchor)
        assert session.distance(layout.spec, anchor) < 1e-4
        session.observe([anchor, 8, 21, 13, 6][: n + 1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_keeps_the_contract(name: str, tmp_path: Path) -> None:
    session = Session(tmp_path, LAYOUTS[name]())
    check_drafter(session.drafter, vocab_size=VOCAB, hidden_size=HIDDEN)


def test_promises_of_the_checkpoint_set_the_draft_length(tmp_path: Path) -> None:
    assert Session(tmp_path / "a", original()).drafter.max_draft == 5
    assert Session(tmp_path / "b", deepspec()).drafter.max_draft == 4
    assert Session(tmp_path / "c", speculators()).drafter.max_draft == 3
    assert Session(tmp_path / "d", speculators(), max_draft=6).drafter.max_draft == 6


MISTAKES = {
    "hidden before embedding": ("original", {"swapped": True}),
    "fc on the drafter's own state": ("original", {"fc_twice": True}),
    "state paired with its own token": ("original", {"same_index": True}),
    "normed output fed back": ("original", {"norm_output": True}),
    "raw output fed back": ("speculators, norms", {"norm_output": False}),
    "residual from the raw state": ("speculators, norms", {"norm_before_residual": False}),
    "window ignored": ("speculators, sliding", {"window": None}),
    "window off by one": ("speculators, sliding", {"window": 7}),
    "another theta": ("original", {"theta": 1e6}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_notices(mistake: str, tmp_path: Path) -> None:
    name, changes = MISTAKES[mistake]
    layout = LAYOUTS[name]()
    session = Session(tmp_path, layout)
    session.observe(list(range(12)))
    assert session.distance(layout.spec, 11) < 1e-4
    assert session.distance(replace(layout.spec, **changes), 11) > 1e-2


def test_drafted_pairs_leave_no_trace(tmp_path: Path) -> None:
    layout = LAYOUTS["original"]()
    session = Session(tmp_path, layout)
    session.observe([3, 1, 4, 1, 5])
    for seed in range(3):
        session.draft(9, TEMPERATURE, seed)
    assert session.distance(layout.spec, 2) < 1e-4


def test_a_head_of_several_layers_is_refused(tmp_path: Path) -> None:
    layout = deepspec()
    extra = {"layers.1.input_layernorm.weight": np.ones(HIDDEN)}
    write(tmp_path, layout.config, layout.tensors | extra)
    with pytest.raises(LoadError, match=r"\[eagle3\] The head must have one layer, got 2\."):
        Eagle3Drafter.load(tmp_path, DeepTarget())
