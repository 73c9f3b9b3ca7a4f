"""The accept rule on all rows of a shared forward: what a batch enqueues after its verify.

Rows that are alike share each operation: greedy ones the whole rule, sampled ones without drafts
their settings and their draws. Every other row goes through the loop's own rule. All outcomes
travel in one array, so a round reads the device once. Nothing is read here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from spec_core.accept import accept_greedy_rows, residual
from spec_core.host import floats_as_ints
from spec_core.loop import Run
from spec_core.sampling import Sampling, draw, target_probs
from spec_core.step import HEADER, Forwarded, n_bad_rows
from spec_core.types import Draft, TargetOutput

_GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a shared forward decided, not read yet.

    Attributes:
        steps: What each row needs once its outcome is read.
        packed: Shape (B, HEADER + K) or (B, HEADER + 2K), int32: per row the header, its drafts,
            and their confidence where any row's draft has one; K is the longest draft.
    """

    steps: list[Forwarded]
    packed: mx.array

    @property
    def next_tokens(self) -> mx.array:
        """Shape (B,), int32: the token that follows each row's accepted drafts."""
        return self.packed[:, 1]

    def by_row(self, values: list[int]) -> list[list[int]]:
        """The flattened `packed`, read, as what `Step.packed` of each row would hold."""
        width = self.packed.shape[1]
        most = max(step.draft.n_drafted for step in self.steps)
        rows: list[list[int]] = []
        for at, step in enumerate(self.steps):
            own = values[at * width : (at + 1) * width]
            n = step.draft.n_drafted
            sure = own[HEADER + most :][:n] if step.draft.confidence is not None else []
            rows.append([*own[: HEADER + n], *sure])
        return rows


def blocks_of(anchors: mx.array, drafts: Sequence[Draft]) -> mx.array:
    """Blocks `[anchor, d1..dK, padding]` of one width: (B,) anchors -> (B, 1 + K), int32."""
    most = max(draft.n_drafted for draft in drafts)
    if most == 0:
        return anchors[:, None]
    parts: list[mx.array] = []
    for at, draft in enumerate(drafts):
        parts += [anchors[at : at + 1], draft.tokens.astype(mx.int32)]
        parts.append(mx.zeros((most - draft.n_drafted,), mx.int32))
    return mx.concatenate(parts).reshape(len(drafts), most + 1)


def decide_rows(
    runs: Sequence[Run],
    blocks: mx.array,
    drafts: Sequence[Draft],
    output: TargetOutput,
    taps: Sequence[int],
) -> Verdict:
    """The accept rule of every row.

    Args:
        runs: Loop states, B of them.
        blocks: From `blocks_of`, shape (B, T).
        drafts: What each row drafted.
        output: Logits (B, T, V), and taps (B, T, H) of the layers `taps`.
        taps: Layers that were recorded.
    """
    steps = [
        Forwarded(draft, _own(run, at, draft, output, taps))
        for at, (run, draft) in enumerate(zip(runs, drafts, strict=True))
    ]
    most = blocks.shape[1] - 1
    confident = any(draft.confidence is not None for draft in drafts)
    packed: dict[int, mx.array] = {}
    for kind, rows in _alike(runs, drafts).items():
        everyone = len(rows) == len(runs)
        index = mx.array(rows, mx.int32)
        mine = blocks if everyone else blocks[index]
        if kind is None:
            own = [runs[at].decide(drafts[at], steps[at].output).packed for at in rows]
            header = mx.stack([one[:HEADER] for one in own])
        else:
            logits = output.logits if everyone else output.logits[index]
            some = [runs[at] for at in rows]
            counts = mx.array([drafts[at].n_drafted for at in rows], mx.int32)
            header = (
                _greedy(logits, mine, counts) if kind.greedy else _sampled(logits[:, 0], kind, some)
            )
        columns = [header, mine[:, 1:]]
        if confident:
            columns.append(mx.stack([_confidence(drafts[at], most) for at in rows]))
        together = mx.concatenate(columns, axis=1)  # (R, width)
        if everyone:
            return Verdict(steps, together)
        packed |= {at: together[i] for i, at in enumerate(rows)}
    return Verdict(steps, mx.stack([packed[at] for at in range(len(runs))]))


def _own(
    run: Run, at: int, draft: Draft, output: TargetOutput, taps: Sequence[int]
) -> TargetOutput:
    """One row's part of a shared output; its drafter's taps only."""
    n = 1 + draft.n_drafted
    own = tuple(output.taps[taps.index(layer)][at, :n] for layer in run.taps)
    return TargetOutput(output.logits[at, :n], own)


def _alike(runs: Sequence[Run], drafts: Sequence[Draft]) -> dict[Sampling | None, list[int]]:
    """Rows by what they can share: settings, or None for rows that are decided one by one."""
    kinds: dict[Sampling | None, list[int]] = {}
    for at, (run, draft) in enumerate(zip(runs, drafts, strict=True)):
        sampling, kind = run.request.sampling, None
        if run.seen is None and run.guide is None:
            if sampling.greedy:
                kind = _GREEDY
            elif draft.n_drafted == 0:
                kind = replace(sampling, seed=None)
        kinds.setdefault(kind, []).append(at)
    return kinds


def _greedy(logits: mx.array, blocks: mx.array, n_drafted: mx.array) -> mx.array:
    """Headers of greedy rows, (R, HEADER): logits (R, T, V), blocks (R, T), counts (R,)."""
    outcome = accept_greedy_rows(logits, blocks[:, 1:], n_drafted)
    header = [outcome.n_accepted, outcome.next_token, outcome.near_ties]
    return mx.stack([*header, n_bad_rows(logits, outcome.n_accepted)], axis=1)


def _sampled(logits: mx.array, sampling: Sampling, runs: Sequence[Run]) -> mx.array:
    """Headers of sampled rows without drafts, (R, HEADER): logits (R, V), a key for each row.

    The same draw as `accept_residual` makes without drafts.
    """
    probs = target_probs(logits, sampling)
    keys = mx.stack([run.next_key() for run in runs])  # (R, 2)
    draw_keys = mx.vmap(lambda key: mx.random.split(key)[1])(keys)
    whole = mx.vmap(lambda p: residual(p, mx.zeros_like(p)))(probs)
    tokens = mx.vmap(draw)(whole, draw_keys)
    none = mx.zeros_like(tokens)
    return mx.stack([none, tokens, none, n_bad_rows(logits[:, None], none)], axis=1)


def _confidence(draft: Draft, most: int) -> mx.array:
    """A draft's confidence as integers, zeros behind: (most,)."""
    n = 0 if draft.confidence is None else draft.n_drafted
    if draft.confidence is None or n == 0:
        return mx.zeros((most,), mx.int32)
    return mx.concatenate([floats_as_ints(draft.confidence), mx.zeros((most - n,), mx.int32)])
