"""One call from names to a pair, with a real tiny mlx-lm model beside a tiny head."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_core import LoadError, generate, load_pair
from spec_drafters import load_drafter

from .checkpoints import backbone_tensors, config, markov_tensors, write

pytest.importorskip("spec_targets", reason="opens the model")
tiny: Any = pytest.importorskip("spec_targets.tiny")
utils: Any = pytest.importorskip("mlx.utils")

VOCAB, DEPTH = 61, 3


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random Qwen3 of three layers; its tokenizer is not what this is about."""
    tokenizer = SimpleNamespace(
        stop_ids=frozenset(), encode=lambda text: [len(w) for w in text.split()], decode=str
    )
    monkeypatch.setattr("spec_targets.load._load_tokenizer", lambda *_: tokenizer)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.tiny_config("qwen3")))
    parameters = utils.tree_flatten(tiny.tiny_model("qwen3").parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(parameters))
    return folder


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A DSpark head that taps its first and last layer."""
    r = np.random.default_rng(0)
    tensors = backbone_tensors(r) | markov_tensors(r, n_draft=VOCAB)
    tensors["markov_head.markov_w1.weight"] = r.normal(size=(VOCAB, 8))
    keys = config(
        architectures=["Qwen3DSparkModel"],
        vocab_size=VOCAB,
        block_size=5,
        mask_token_id=3,
        target_layer_ids=[0, 2],
        num_target_layers=DEPTH,
    )
    return write(tmp_path / "head", keys, tensors)


def ids(pair: Any) -> tuple[list[int], set[str]]:
    rounds = list(generate(pair, "one three five", max_tokens=40))
    return [t for r in rounds for t in r.tokens], {r.source for r in rounds}


@pytest.mark.parametrize("mode", ["auto", "dspark"])
def test_a_pair_in_one_call_commits_what_plain_decoding_does(
    mode: str, model: Path, head: Path
) -> None:
    plain, _ = ids(load_pair(model, mode="baseline"))
    pair = load_pair(model, drafter=head, mode=mode)
    drafted, sources = ids(pair)
    assert drafted == plain
    assert "dspark" in sources
    assert pair.drafter is not None
    assert pair.drafter.name == ("lookup+dspark" if mode == "auto" else "dspark")


def test_the_model_drafts_for_itself(model: Path) -> None:
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    pair = load_pair(model, drafter=model, mode="draft-model")
    rounds = list(generate(pair, "one three five", max_tokens=30))
    plain, _ = ids(load_pair(model, mode="baseline"))
    assert [t for r in rounds for t in r.tokens] == plain[:30]
    verified = [r for r in rounds if r.kind == "verify"]
    assert all(r.n_accepted == r.n_drafted for r in verified)


def words(folder: Path, *tokens: str) -> None:
    vocab = {token: i for i, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))


def test_words_are_compared_whether_or_not_the_target_is_named(
    model: Path, head: Path, tmp_path: Path
) -> None:
    target = load_pair(model, mode="baseline").target
    small = tmp_path / "small"
    shutil.copytree(model, small)
    words(model, "a", "b", "c")
    words(small, "a", "c", "b")
    words(head, "a", "b", "d")
    for named in ({}, {"model": str(model)}, {"model": "a name that is no folder"}):
        with pytest.raises(LoadError, match='got "c" and "b" for id 1'):
            load_drafter(small, target, mode="draft-model", **named)
        with pytest.raises(LoadError, match='got "d" and "c" for id 2'):
            load_drafter(head, target, **named)
    words(head, "a", "b", "c", "added later")
    assert load_drafter(head, target).name == "lookup+dspark"
    assert load_drafter(None, target, mode="lookup").name == "lookup"  # still there


def test_a_draft_model_for_a_target_of_unknown_words_is_refused(model: Path) -> None:
    words(model, "a")
    target = load_pair(model, mode="baseline").target
    target.folder = None  # type: ignore[attr-defined]
    with pytest.raises(LoadError, match="the target's is not known. Name its folder"):
        load_drafter(model, target, mode="draft-model")
    assert load_drafter(model, target, mode="draft-model", model=str(model)).name == "draft-model"
