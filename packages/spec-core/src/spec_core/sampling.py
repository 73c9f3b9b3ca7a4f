"""From logits to the distribution that tokens are drawn from, and draws with an explicit key.

The target's distribution is what comes out of `target_probs`: penalties first, then temperature,
then top-k, top-p and min-p. Every mode draws from exactly this distribution, so the settings never
cost losslessness. Knows nothing about drafts.

References:
    top-p: Holtzman et al. 2019, arXiv:1904.09751. min-p: Nguyen et al. 2024, arXiv:2407.01082.
    repetition penalty: Keskar et al. 2019, arXiv:1909.05858, section 4.1.
"""

import math
from dataclasses import dataclass

import mlx.core as mx

# Temperatures beyond these have the same effect, and in float32 would turn into 0 or infinity.
_COLDEST, _HOTTEST = 1e-30, 1e30
# Half the step between uniform draws, which come in 2^-32ths: added, it keeps them above 0.
_HALF_STEP = 2.0**-33


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of one request.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1].
        min_p: Drop tokens less likely than min_p times the most likely one, in [0, 1).
        repetition_penalty: Above 1 lowers the logit of every token seen in prompt or answer.
        presence_penalty: Subtracted once from the logit of each token the answer holds.
        frequency_penalty: Subtracted per occurrence in the answer.
        seed: Fixes the draws of one mode; None takes a fresh seed.

    Raises:
        ValueError: a setting is outside its range.
        TypeError: top_k or seed is not a whole number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in ("temperature", *penalties):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(
                    f"[sampling] {name} must be a finite number, got {getattr(self, name)}."
                )
        for name, value in (("top_k", self.top_k), ("seed", 0 if self.seed is None else self.seed)):
            if not isinstance(value, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"[sampling] {name} must be a whole number, got {value!r}.")
        if self.temperature < 0:
            raise ValueError(f"[sampling] temperature must be >= 0, got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"[sampling] top_k must be >= 0 (0 = off), got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"[sampling] top_p must be in (0, 1], got {self.top_p}.")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"[sampling] min_p must be in [0, 1), got {self.min_p}.")
        if self.repetition_penalty <= 0:
            raise ValueError(
                f"[sampling] repetition_penalty must be > 0 (1 = off), "
                f"got {self.repetition_penalty}."
            )
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"[sampling] seed must be in 0..2^64-1, got {self.seed}.")

    @property
    def greedy(self) -> bool:
        """True at temperature 0."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True when the distribution depends on the tokens seen so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """How often each token occurred, for penalties.

    Attributes:
        prompt: Shape (V,), float32, counts in the prompt.
        answer: Shape (V,) or (T, V), float32, counts in the answer.
    """

    prompt: mx.array
    answer: mx.array


def count_tokens(tokens: mx.array, vocab_size: int) -> mx.array:
    """Occurrences of each id: (n,) int32 -> (V,) float32."""
    return mx.zeros((vocab_size,)).at[tokens].add(1.0)


def seen_by_row(seen: Seen, drafts: mx.array) -> Seen:
    """What each row of a verify block has seen: row i also counts drafts 1..i.

    Args:
        seen: Counts up to and including the anchor.
        drafts: Shape (K,), int32.

    Returns:
        Counts with `answer` of shape (K + 1, V).
    """
    vocab = mx.arange(seen.prompt.shape[0])
    one_hot = (drafts[:, None] == vocab[None, :]).astype(mx.float32)  # (K, V)
    steps = mx.concatenate([mx.zeros((1, vocab.shape[0])), mx.cumsum(one_hot, axis=0)])
    return Seen(seen.prompt, seen.answer[None, :] + steps)


def penalise(logits: mx.array, settings: Sampling, seen: Seen) -> mx.array:
    """Apply repetition, presence and frequency penalties: (T, V) -> (T, V), float32."""
    logits = logits.astype(mx.float32)
    if settings.repetition_penalty != 1.0:
        scaled = mx.where(
            logits > 0,
            logits / settings.repetition_penalty,
            logits * settings.repetition_penalty,
        )
        logits = mx.where((seen.prompt + seen.answer) > 0, scaled, logits)
    logits = logits - settings.frequency_penalty * seen.answer
    return logits - settings.presence_penalty * (seen.answer > 0).astype(mx.float32)


def target_probs(logits: mx.array, settings: Sampling) -> mx.array:
    """The distribution that a sampled token must follow: temperature, top-k, top-p, min-p.

    Args:
        logits: Shape (T, V), any float type, penalties already applied.
        settings: Temperature above 0.

    Returns:
        Shape (T, V), float32, rows sum to 1. The most likely token always survives.

    Raises:
        ValueError: the settings are greedy.
    """
    if settings.greedy:
        raise ValueError("[sampling] temperature must be > 0 here; greedy takes the arg-max.")
    logits = logits.astype(mx.float32)
    # Subtracting the row maximum first keeps tiny temperatures from overflowing.
    temperature = min(max(settings.temperature, _COLDEST), _HOTTEST)
    logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    vocab_size = logits.shape[-1]
    if 0 < settings.top_k < vocab_size:
        logits = _keep_top_k(logits, settings.top_k)
    if settings.top_p < 1.0:
        logits = _keep_top_p(logits, settings.top_p)
    if settings.min_p > 0.0:
        # The maximum is 0, so p / p_max = exp(logit).
        logits = mx.where(logits >= math.log(settings.min_p), logits, -mx.inf)
    return mx.softmax(logits, axis=-1, precise=True)


def _keep_top_k(logits: mx.array, k: int) -> mx.array:
    """All but the k best set to -inf; of tied logits the lower ids are kept."""
    order = mx.argsort(-logits, axis=-1)[:, :k]  # (T, k)
    kept = mx.take_along_axis(logits, order, axis=-1)
    return mx.put_along_axis(mx.full(logits.shape, -mx.inf), order, kept, axis=-1)


def _keep_top_p(logits: mx.array, top_p: float) -> mx.array:
    """Everything outside the smallest set of best tokens with mass >= top_p set to -inf."""
    order = mx.argsort(-logits, axis=-1)
    ranked = mx.take_along_axis(logits, order, axis=-1)
    probs = mx.softmax(ranked, axis=-1, precise=True)
    mass_before = mx.cumsum(probs, axis=-1) - probs
    kept = mx.where(mass_before < top_p, ranked, -mx.inf)
    # The best token survives even when rounding leaves mass_before[0] at a hair above 0.
    kept[:, :1] = ranked[:, :1]
    return mx.put_along_axis(mx.zeros_like(logits), order, kept, axis=-1)


def draw(probs: mx.array, key: mx.array) -> mx.array:
    """One token per row: (..., V) probabilities -> (...) int32.

    A token of probability 0 is never drawn. Tokens race: each arrives after an exponential time of
    rate p, and the first one wins with probability p.
    """
    u = mx.random.uniform(low=_HALF_STEP, shape=probs.shape, key=key)
    # A time of 0 or infinity would let tokens of probability 0 win, or tie. Not -log(u): near 1 the
    # steps of float32 are 2^-24, too coarse for the short times by which rare tokens win.
    return mx.argmax(probs / -mx.log1p(-u), axis=-1).astype(mx.int32)
