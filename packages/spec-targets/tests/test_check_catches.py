"""A rollback broken on purpose must not get past `check_target`."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from spec_core.testing import check_target
from spec_targets import MlxTarget
from spec_targets.families import FAMILIES
from spec_targets.recurrent import RecurrentCache
from spec_targets.window import WindowCache

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 2, 38]
EXACT, ROUNDED = 0.0, 1e-3  # single rows and prompt chunks of Mamba-2 round differently


def kept_whole(self, n_rows, n_keep):
    """The state is left as the whole block made it."""
    self._before = None


def never_abandoned(self, n_rows, n_keep, keep=RecurrentCache.keep):
    """A block that is given up leaves its state behind."""
    keep(self, n_rows, n_keep or n_rows)


def one_row_late(self, rows, n_before, note=RecurrentCache.note_window):
    """The convolution window starts one row too late."""
    note(self, mx.concatenate([rows[:, 1:], rows[:, -1:]], axis=1), n_before)


def one_row_short(self, state_after, note=RecurrentCache.note_recurrence):
    """The recurrence runs over one row too few."""
    note(self, lambda n_rows: state_after(max(1, n_rows - 1)))


def window_one_short(self, n, trim=WindowCache.trim):
    """One rejected row stays in the window."""
    return trim(self, max(0, n - 1))


def window_positions_only(self, n):
    """Positions go back, the rows stay: the library's own rollback once a window is full."""
    self.offset -= n
    return n


def trim_nothing(self, n):
    return n


BROKEN = [
    ("qwen3_5", RecurrentCache, "keep", kept_whole, EXACT),
    ("qwen3_5", RecurrentCache, "keep", never_abandoned, EXACT),
    ("qwen3_5", RecurrentCache, "note_window", one_row_late, EXACT),
    ("qwen3_5", RecurrentCache, "note_recurrence", one_row_short, EXACT),
    ("mamba2", RecurrentCache, "keep", kept_whole, ROUNDED),
    ("mamba2", RecurrentCache, "note_window", one_row_late, ROUNDED),
    ("mamba2", RecurrentCache, "note_recurrence", one_row_short, ROUNDED),
    ("lfm2", RecurrentCache, "keep", kept_whole, EXACT),
    ("lfm2", RecurrentCache, "note_window", one_row_late, EXACT),
    ("gemma3_text", WindowCache, "trim", window_one_short, EXACT),
    ("gemma3_text", WindowCache, "trim", window_positions_only, EXACT),
    ("qwen3", KVCache, "trim", trim_nothing, EXACT),
]


@pytest.mark.parametrize(
    ("model_type", "owner", "method", "broken", "atol"),
    BROKEN,
    ids=[f"{case[0]}-{case[3].__name__}" for case in BROKEN],
)
def test_a_broken_rollback_is_caught(
    make_target, monkeypatch, model_type, owner, method, broken, atol
):
    target = make_target(model_type)
    check_target(target, prompt=PROMPT, n_rounds=4, atol=atol)
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(AssertionError, match="round"):
        check_target(target, prompt=PROMPT, n_rounds=12, atol=atol)


def test_a_window_of_one_row_less_fools_the_check_but_not_plain_mlx_lm(make_model, monkeypatch):
    """Why families are also compared with mlx-lm: a model may agree with itself and be wrong."""
    model = make_model("gemma3_text")
    original = WindowCache.__init__
    monkeypatch.setattr(WindowCache, "__init__", lambda self, window: original(self, window - 1))
    target = MlxTarget(model, FAMILIES["gemma3_text"], "gemma3_text")
    check_target(target, prompt=PROMPT, n_rounds=8)

    logits = target.prefill(PROMPT * 2, target.make_cache()).logits
    want = make_model("gemma3_text")(mx.array([PROMPT * 2]))[0, -1:]
    assert mx.abs(logits - want).max().item() > 1e-3
