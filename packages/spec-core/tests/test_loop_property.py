"""Any request, any drafter, any cap: the same answer as a plain loop written here in NumPy."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from spec_core import Pair, Round, Sampling, generate
from spec_core.testing import ScriptedDrafter, ToyDrafter, ToyTarget

VOCAB = 7
TARGETS = [ToyTarget(VOCAB, seed=seed) for seed in range(4)]


class Pieces:
    """Tokens are one to three characters; the last one is special."""

    stop_ids: frozenset[int] = frozenset()
    words = ("a", "b", "ab", " ", "ba", "aab", "")

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.words[token] for token in tokens)


class Caps:
    """Goes through a list of caps again and again."""

    def __init__(self, caps: Sequence[int]) -> None:
        self.caps, self.at = caps, -1

    def next(self) -> int:
        self.at += 1
        return self.caps[self.at % len(self.caps)]

    def observe(self, round_: Round) -> None:
        pass


def plain(
    target: ToyTarget, prompt, limit, stop_ids, stops, sampling, reference
) -> tuple[list[int], str, str]:
    """Greedy decoding: (ids, text, finish reason)."""
    table, answer = np.array(target.table, np.float64), []
    sharp = {name: getattr(sampling, name) for name in sampling.__slots__} | {"temperature": 0.01}
    text = ""
    while len(answer) < limit:
        before = [0, 0, *prompt, *answer]
        row = table[before[-2], before[-1]]
        answer.append(int(reference(row, Sampling(**sharp), prompt, answer).argmax()))
        if answer[-1] in stop_ids:
            return answer, text, "stop"
        text = Pieces().decode(answer)
        places = [place for stop in stops if (place := text.find(stop)) >= 0]
        if places:
            return answer, text[: min(places)], "stop"
    return answer, text, "length"


@hypothesis_settings(max_examples=120, deadline=None)
@given(
    target=st.sampled_from(TARGETS),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    limit=st.integers(1, 30),
    chunk=st.integers(1, 10),
    stop_ids=st.sets(st.integers(0, VOCAB - 1), max_size=1),
    stops=st.lists(st.text("ab ", min_size=1, max_size=5), max_size=2),
    caps=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    wrong_at=st.sets(st.integers(1, 5)),
    penalty=st.sampled_from([{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.31}]),
    scripted=st.booleans(),
    room=st.one_of(st.none(), st.integers(1, 12)),
)
def test_any_request_gets_the_answer_of_plain_decoding(
    reference,
    target,
    prompt,
    limit,
    chunk,
    stop_ids,
    stops,
    caps,
    wrong_at,
    penalty,
    scripted,
    room,
):
    sampling = Sampling(**penalty)
    arguments = (prompt, limit if room is None else min(limit, room), stop_ids, stops, sampling)
    ids, text, reason = plain(target, *arguments, reference)
    drafter = ToyDrafter(VOCAB)
    if scripted:
        longer, _, _ = plain(target, prompt, len(ids) + 3, (), (), sampling, reference)
        drafter = ScriptedDrafter(longer, len(prompt), VOCAB, 5, sorted(wrong_at))
    limited = ToyTarget(VOCAB, context_length=None if room is None else len(prompt) + room)
    limited.table = target.table
    cache = limited.make_cache()
    drafter.reset()
    rounds = list(
        generate(
            Pair(limited, drafter, Pieces()),
            prompt,
            max_tokens=limit,
            sampling=sampling,
            cap=Caps(caps),
            stop_ids=sorted(stop_ids),
            stop_strings=stops,
            cache=cache,
            prefill_chunk=chunk,
            with_logits=True,
        )
    )
    emitted = [token for round_ in rounds for token in round_.tokens]
    assert (emitted, rounds[-1].finish_reason) == (ids, reason)
    assert "".join(round_.text for round_ in rounds) == text
    assert cache.tokens.tolist() == drafter.observed == prompt + ids[:-1]
    for round_ in rounds:
        assert round_.logits is not None
        assert round_.logits.shape == (len(round_.tokens), VOCAB)
        assert 0 <= round_.n_accepted <= round_.n_drafted <= max(caps)
