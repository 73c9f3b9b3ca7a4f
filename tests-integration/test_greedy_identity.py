"""On the real embedded default: baseline, lookup and mlx-lm give the same ids.

Few prompts and tokens, for CI; `benchmarks/identity.py` runs the whole set.
"""

from itertools import islice

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

import spec_demo
from spec_convert import convert
from spec_core import Pair, StatsMeter, generate
from spec_drafters import LookupDrafter
from spec_targets import load_target

pytestmark = pytest.mark.weights

# Short ones, because a CPU without a fast BLAS takes its time: the first is a copy run.
PROMPTS = ("one, two, three, four, one, two, three, four, one, two,", "The sky is blue because")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "smollm2"
    convert(spec_demo.target_gguf(), folder)
    return load_target(folder)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_modes_and_mlx_lm_agree(demo, prompt):
    target, tokenizer = demo
    ids = tokenizer.encode(prompt)
    meter, lookup = StatsMeter(), []
    for round_ in generate(Pair(target, LookupDrafter()), ids, max_tokens=20):
        meter.add(round_)
        lookup += round_.tokens
    baseline = [t for r in generate(Pair(target), ids, max_tokens=20) for t in r.tokens]
    steps = generate_step(mx.array(ids), target.model, max_tokens=20)
    reference = [token for token, _ in islice(steps, 20)]
    assert baseline == lookup == reference
    if prompt is PROMPTS[0]:
        assert meter.result().n_accepted >= 3  # otherwise nothing was shown
