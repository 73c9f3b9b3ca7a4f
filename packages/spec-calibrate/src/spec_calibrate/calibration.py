"""The one call an application needs: stored curves if they fit, else measured and stored.

calibration = load_or_measure(pair, key_for(model=...), notify=print)
rounds = generate(pair, prompt, cap=CapController(calibration.curves))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from spec_calibrate.curves import Curves, knee
from spec_calibrate.expected import Choice, best_cap, speedups
from spec_calibrate.keys import Key
from spec_calibrate.measure import NOISY, measure
from spec_calibrate.samples import UNKNOWN_NOISE
from spec_calibrate.store import Store
from spec_core import Pair

_MOST_TRIES = 4
_OCCASION_S = 60.0  # what disturbed a measurement is given so long to end


@dataclass(frozen=True, slots=True)
class Calibration:
    """Curves with where they come from.

    Attributes:
        curves: Measured costs.
        key: What they are valid for.
        created: When they were measured, ISO 8601.
        cached: True when they come from the store.
    """

    curves: Curves
    key: Key
    created: str
    cached: bool

    @property
    def choice(self) -> Choice:
        """The fixed cap that pays best at the acceptance seen while measuring."""
        return best_cap(self.curves)

    @property
    def noisy(self) -> bool:
        """True when repeated measurements lay far apart; `calibrate` again on a quiet machine."""
        return self.curves.noise > NOISY

    @property
    def guessed(self) -> bool:
        """True when not every width was timed often enough to know how far times lie apart."""
        return self.curves.noise == UNKNOWN_NOISE

    def to_json(self) -> dict[str, Any]:
        """Plain data with the keys of `spec calibrate --json`."""
        data, choice = self.curves.to_dict(), self.choice
        depth, shallow = self.curves.verify[0]
        return {
            "key": self.key.to_dict(),
            "verify_ms": shallow.to_ms(),
            **data,
            "plain_ms": self.curves.plain_s(depth) * 1e3,
            "knee": knee(shallow),
            "chosen_cap": choice.cap,
            "expected_speedup": choice.speedup,
            "speedup_by_cap": [round(gain, 4) for gain in speedups(self.curves)],
            "noisy": self.noisy,
            "created": self.created,
            "cached": self.cached,
        }


def calibrate(
    pair: Pair,
    key: Key,
    *,
    store: Store | None = None,
    budget_s: float = 5.0,
    prompts: Sequence[Sequence[int]] | None = None,
    notify: Callable[[str], None] | None = None,
) -> Calibration:
    """Measure now, and keep the result for later runs.

    Args:
        pair: Target and drafter.
        key: What the result is valid for; see `key_for`.
        store: Where to keep it; the user's cache folder without.
        budget_s: Seconds to spend, about.
        prompts: Ids that drafts are tried on; a few built-in texts without.
        notify: Called with each remark, such as a noisy measurement.
    """
    curves = measure(pair, budget_s=budget_s, prompts=prompts)
    return _kept(curves, key, store or Store(), notify)


def load_or_measure(
    pair: Pair,
    key: Key,
    *,
    store: Store | None = None,
    budget_s: float = 5.0,
    prompts: Sequence[Sequence[int]] | None = None,
    notify: Callable[[str], None] | None = None,
) -> Calibration:
    """The stored calibration of a key, or a new one; arguments as in `calibrate`.

    A stored one that does not cover the pair's largest draft is measured anew. A noisy one was
    perhaps taken while the machine was busy, and would choose a wrong cap for ever: it is measured
    again on later occasions, `_MOST_TRIES` times in all, and the best is kept; until then, and
    where the machine stays noisy, it is used with a remark each time.
    """
    store = store or Store()
    stored = store.get(key)
    if stored.reason and notify is not None:
        notify(f"{stored.reason} It is measured again.")
    if stored.curves is not None and stored.curves.max_draft >= pair.max_draft:
        found = Calibration(stored.curves, key, stored.created, True)
        if found.noisy and stored.tries < _MOST_TRIES and stored.age_s >= _OCCASION_S:
            fresh = measure(pair, budget_s=budget_s, prompts=prompts)
            best = min(stored.curves, fresh, key=_unrest)  # neighbours only ever add time
            return _kept(best, key, store, notify, tries=stored.tries + 1)
        if notify is not None:
            _remark_on_noise(found, notify, final=stored.tries >= _MOST_TRIES)
        return found
    return calibrate(pair, key, store=store, budget_s=budget_s, prompts=prompts, notify=notify)


def _kept(
    curves: Curves,
    key: Key,
    store: Store,
    notify: Callable[[str], None] | None,
    *,
    tries: int = 1,
) -> Calibration:
    """What has just been measured, stored and remarked on."""
    found = Calibration(curves, key, datetime.now(UTC).isoformat(timespec="seconds"), False)
    complaint = store.put(key, curves, tries=tries)
    if notify is not None:
        if complaint:
            notify(complaint)
        _remark_on_noise(found, notify, final=tries >= _MOST_TRIES)
    return found


def _unrest(curves: Curves) -> tuple[float, float]:
    """Less is better: the spread, then the time of the widest verify."""
    depth, _ = curves.verify[0]
    return curves.noise, curves.verify_s(curves.max_draft + 1, depth)


def _remark_on_noise(found: Calibration, notify: Callable[[str], None], *, final: bool) -> None:
    """What is wrong with it; a final one is not measured again by itself."""
    if found.guessed:
        remedy = (
            "spec calibrate measures again."
            if final
            else "It is measured again later; spec calibrate does so now."
        )
        notify(
            "[calibrate] Every width must be timed three times, and this machine was too slow or "
            f"too busy for that: the cap is a guess. {remedy}"
        )
    elif found.noisy:
        which = f"The stored ones of {found.created[:10]}" if found.cached else "Repeated ones"
        notify(
            f"[calibrate] Measurements must agree for a good cap. {which} differ by "
            f"{found.curves.noise:.0%}: run spec calibrate when the machine is quiet."
        )
