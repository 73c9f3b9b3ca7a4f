import json
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from spec_core import LoadError, Pair, generate
from spec_core.testing import ScriptedDrafter, check_target
from spec_targets import load_target
from spec_targets.parallel import lead
from spec_targets.tiny import VOCAB, build, tiny_config

PROMPT = [3, 14, 15, 9, 26, 5, 35]
WORKER = Path(__file__).parent / "parallel_worker.py"


@pytest.fixture
def checkpoint(tmp_path):
    def write(model_type):
        config = tiny_config(model_type)
        parameters = dict(tree_flatten(build(config).parameters()))
        mx.save_safetensors(str(tmp_path / "model.safetensors"), parameters)
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = {f"w{i}": i for i in range(VOCAB)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
        return tmp_path

    return write


def launch(n_ranks, *arguments):
    """What each rank printed, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = Path(sys.executable).parent / "mlx.launch"
    command = [launcher, "-n", n_ranks, "--backend", "ring", "-p", port, "--", sys.executable]
    run = subprocess.run(
        [str(part) for part in (*command, *arguments)], capture_output=True, timeout=300, text=True
    )
    reports = [json.loads(x) for x in run.stdout.splitlines() if x.startswith("{")]
    assert len(reports) == n_ranks, run.stdout + run.stderr
    return sorted(reports, key=lambda report: report["rank"])


def ids_of(rounds):
    return [token for round_ in rounds for token in round_.tokens]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe"])
def test_two_processes_commit_the_tokens_of_one(checkpoint, model_type):
    folder = checkpoint(model_type)
    target, _ = load_target(folder)
    want = ids_of(generate(Pair(target), PROMPT, max_tokens=30))
    cache = target.make_cache()
    target.prefill(PROMPT, cache)

    first, second = launch(2, WORKER, folder)
    assert first["size"] == second["size"] == 2
    assert first["plain"] == first["drafted"] == want
    assert first["accepted"] > 5
    # The last token is never forwarded.
    assert second["rows"] == [PROMPT + want[:-1]] * 2
    assert first["bytes"] == second["bytes"] == cache.nbytes / 2


def test_the_leading_target_keeps_the_contract(make_target):
    alone = mx.distributed.init()  # without a launcher: one process
    with lead(make_target("qwen3"), alone) as whole:
        check_target(whole, prompt=PROMPT, taps=(0, 2), n_rounds=6)
        assert whole.exact_refusal is not None and "between 1 processes" in whole.exact_refusal


def test_the_leading_target_decodes_what_its_part_does(make_target):
    want = ids_of(generate(Pair(make_target("qwen3_5")), PROMPT, max_tokens=20))
    with lead(make_target("qwen3_5"), mx.distributed.init()) as whole:
        drafter = ScriptedDrafter(want, len(PROMPT), VOCAB, wrong_at=(3,), taps=(1,))
        assert ids_of(generate(Pair(whole, drafter), PROMPT, max_tokens=20)) == want


def test_a_model_that_mlx_lm_cannot_split_is_refused(checkpoint):
    class TwoRanks:
        def size(self):
            return 2

    with pytest.raises(LoadError, match='cannot split model type "gemma3_text" over 2 processes'):
        load_target(checkpoint("gemma3_text"), group=TwoRanks())


def test_heads_that_do_not_divide_by_the_processes_are_refused(checkpoint):
    class ThreeRanks:
        def size(self):
            return 3

    with pytest.raises(
        LoadError, match=r'"num_attention_heads" must be a multiple of the 3 .*got 4'
    ):
        load_target(checkpoint("llama"), group=ThreeRanks())
