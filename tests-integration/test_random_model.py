"""A folder of random weights opens as a checkpoint, repeats, and is written in little memory."""

import json
import sys

import mlx.core as mx
import pytest

from spec_core import FixedCap, LoadError, Pair, generate
from spec_server import Served, Server, Settings
from spec_targets import load_target


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_random_model_opens_and_repeats(run, byte_words, tmp_path, bits):
    ids, weights = [], []
    for seed in (0, 0, 1):
        out = tmp_path / f"{len(ids)}"
        code, said = run(
            "random_model",
            out,
            "--shape",
            "tiny",
            "--bits",
            bits,
            "--tokenizer",
            byte_words,
            "--seed",
            seed,
        )
        assert code == 0 and f"tiny, {bits} bits" in said
        target, tokenizer = load_target(out)
        prompt = tokenizer.encode("One two three")
        ids.append([t for r in generate(Pair(target), prompt, max_tokens=8) for t in r.tokens])
        weights.append([path.read_bytes() for path in sorted(out.glob("*.safetensors"))])
    assert ids[0] == ids[1] and weights[0] == weights[1] and weights[0] != weights[2]
    assert len(weights[0]) == 5 and target.vocab_size == 257  # two layers, embedding, norm, head


def test_a_random_model_is_served(script, byte_words, tmp_path):
    random_model = script("random_model")
    random_model.write(tmp_path / "out", random_model.TINY, 4, byte_words)

    def load():
        target, tokenizer = load_target(tmp_path / "out")
        return Served(Pair(target, None, tokenizer), "random", "baseline", lambda wish: FixedCap(0))

    with Server(load, Settings(port=0)) as server:
        assert server.engine.context_length == 2048


def test_a_random_model_is_drawn_part_by_part(script, tmp_path):
    random_model = script("random_model")
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text('{"vocab_size": 64, "eos_token_id": 3}')
    shape = random_model.replace(random_model.TINY, hidden_size=512, num_hidden_layers=24)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    n_bytes = random_model.write(tmp_path / "out", shape, 16, tmp_path / "small")
    assert mx.get_peak_memory() - before < n_bytes / 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (64, 3)


def test_a_random_model_that_was_interrupted_does_not_open(
    script, byte_words, tmp_path, monkeypatch
):
    random_model = script("random_model")

    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr(random_model.mx, "save_safetensors", full)
    with pytest.raises(OSError, match="No space"):
        random_model.write(tmp_path / "out", random_model.TINY, 4, byte_words)
    with pytest.raises(LoadError, match="config.json"):
        load_target(tmp_path / "out")


def test_a_folder_that_exists_or_has_no_vocabulary_is_refused(
    script, tmp_path, monkeypatch, capsys
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text('{"vocab_size": 64}')
    for out, said in (("empty", "exists"), ("out", "Give the folder of a checkpoint")):
        words = tmp_path / ("full" if said == "exists" else "empty")
        monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / out), "--tokenizer", str(words)])
        with pytest.raises(SystemExit):
            script("random_model").main()
        assert said in capsys.readouterr().err
