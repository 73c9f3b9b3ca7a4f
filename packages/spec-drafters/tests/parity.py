"""Runs a loaded drafter over random committed rows and compares each draft with the reference."""

from typing import Any

import mlx.core as mx
import numpy as np

from spec_core import Draft, Sampling, TargetOutput

from .checkpoints import HIDDEN, VOCAB, TinyTarget
from .reference import Spec, Tensors, chain, hidden_rows, log_softmax

TEMPERATURE = 0.7


class Session:
    """Committed rows with random taps, fed to a drafter and kept for the reference."""

    def __init__(self, drafter: Any, target: TinyTarget, w: Tensors, seed: int = 0) -> None:
        self.drafter = drafter
        self.rng = np.random.default_rng(seed)
        self.n_taps = len(drafter.taps)
        self.taps = np.zeros((0, self.n_taps * HIDDEN))
        table = np.array(target.embed(mx.arange(VOCAB))).astype(np.float64)
        self.embedding = w.get("embed_tokens.weight", table)
        matrix = np.array(target.unembed(mx.eye(HIDDEN))).astype(np.float64).T
        self.head = w.get("lm_head.weight", matrix)
        ids = np.arange(len(self.head))
        self.target_ids = ids + w["d2t"] if "d2t" in w else ids
        self.w = w

    def observe(self, n_rows: int) -> None:
        rows = self.rng.normal(size=(n_rows, self.n_taps * HIDDEN))
        self.taps = np.concatenate([self.taps, rows])
        parts = np.split(rows.astype(np.float32), self.n_taps, axis=1)
        tokens = self.rng.integers(0, VOCAB, n_rows).tolist()
        output = TargetOutput(mx.zeros((n_rows, 1)), tuple(mx.array(p) for p in parts))
        self.drafter.observe(tokens, output)

    def reference(self, spec: Spec, anchor: int, tokens: list[int], kept: int = 0) -> Any:
        """Slots of the reference, forced along the drafted tokens."""
        taps = self.taps[-kept:] if kept else self.taps
        hidden = hidden_rows(spec, self.w, self.embedding, taps, anchor)
        return chain(spec, self.w, hidden, self.head, anchor, lambda i, _: tokens[i])

    def check(self, spec: Spec, *, n_rounds: int = 4) -> None:
        """Several rounds, greedy and sampled."""
        for n in range(n_rounds):
            anchor = int(self.rng.integers(0, VOCAB))
            self.check_greedy(spec, anchor)
            self.check_sampled(spec, anchor, n)
            self.observe(1 + n % (self.drafter.max_draft + 1))

    def check_greedy(self, spec: Spec, anchor: int) -> None:
        draft = self.draft(anchor, Sampling())
        tokens: list[int] = draft.tokens.tolist()  # type: ignore[assignment]
        slots = self.reference(spec, anchor, tokens + [0] * spec.block)
        assert draft.probs is None
        for slot, token in zip(slots, tokens, strict=False):
            drafted = slot.logits[self.target_ids == token]
            assert slot.logits.max() - drafted.item() < 1e-4
        self.check_confidence(draft, slots)

    def check_sampled(self, spec: Spec, anchor: int, seed: int) -> None:
        draft = self.draft(anchor, Sampling(temperature=TEMPERATURE), seed)
        tokens: list[int] = draft.tokens.tolist()  # type: ignore[assignment]
        slots = self.reference(spec, anchor, tokens + [0] * spec.block)
        assert draft.probs is not None
        probs = np.array(draft.probs).astype(np.float64)
        others = np.setdiff1d(np.arange(VOCAB), self.target_ids)
        assert np.all(probs[:, others] == 0)
        for slot, row in zip(slots, probs, strict=False):
            assert self.gap(slot.logits, row) < 1e-4
        self.check_confidence(draft, slots)

    def gap(self, logits: np.ndarray, probs: np.ndarray) -> float:
        """Largest difference of log-probabilities, in units of logits, where q is not tiny."""
        want = log_softmax(logits / TEMPERATURE)
        got = probs[self.target_ids]
        seen = want > -16
        if np.any(got[np.isinf(want)] > 0) or np.any(got[seen] == 0):
            return float("inf")
        return float(np.abs(np.log(got[seen]) - want[seen]).max() * TEMPERATURE)

    def check_confidence(self, draft: Draft, slots: list[Any]) -> None:
        wanted = [s.confidence for s in slots[: draft.n_drafted]]
        if wanted[0] is None:
            assert draft.confidence is None
        else:
            assert draft.confidence is not None
            np.testing.assert_allclose(np.array(draft.confidence), wanted, atol=1e-5)

    def distance(self, spec: Spec, anchor: int) -> float:
        """How far a (wrong) spec is from what the drafter computes: largest gap of any slot."""
        draft = self.draft(anchor, Sampling(temperature=TEMPERATURE))
        tokens: list[int] = draft.tokens.tolist()  # type: ignore[assignment]
        slots = self.reference(spec, anchor, tokens + [0] * spec.block)
        probs = np.array(draft.probs).astype(np.float64)
        return max(self.gap(s.logits, row) for s, row in zip(slots, probs, strict=False))

    def draft(
        self, anchor: int, sampling: Sampling, seed: int = 0, cap: int | None = None
    ) -> Draft:
        key = mx.random.key(seed)
        return self.drafter.draft(anchor, cap or self.drafter.max_draft, sampling=sampling, key=key)
