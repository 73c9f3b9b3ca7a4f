"""`mlx.launch -n 2 spec generate`: two processes answer with the ids of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spec_targets.tiny import VOCAB, build, tiny_config

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, RANK = 32, 48, 4, 2, 8, 8
TAPS = (0, 1)


def write_target(folder: Path, model_type: str) -> Path:
    folder.mkdir()
    config = tiny_config(model_type)
    weights = dict(tree_flatten(build(config).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def write_dspark(folder: Path) -> Path:
    """A random DSpark head of two layers for the tiny targets."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "rope_theta": 1e6,
        "block_size": 5,
        "mask_token_id": 3,
        "target_layer_ids": list(TAPS),
        "num_target_layers": 3,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "layer_types": ["full_attention"] * 2,
    }
    shapes = {
        "fc.weight": (HIDDEN, len(TAPS) * HIDDEN),
        "markov_head.markov_w1.weight": (VOCAB, RANK),
        "markov_head.markov_w2.weight": (VOCAB, RANK),
        "confidence_head.proj.weight": (1, HIDDEN + RANK),
        "confidence_head.proj.bias": (1,),
    }
    norms = ["hidden_norm.weight", "norm.weight"]
    for i in range(2):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        shapes[f"{attention}.q_proj.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes[f"{attention}.k_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[f"{attention}.v_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[f"{attention}.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[f"{mlp}.gate_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{mlp}.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, INNER)
        norms += [f"layers.{i}.{n}_layernorm.weight" for n in ("input", "post_attention")]
    keys = mx.random.split(mx.random.key(11), len(shapes))
    weights = {
        name: mx.random.normal(shape, key=key) * shape[-1] ** -0.5
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    weights |= {name: mx.ones(HIDDEN) for name in norms}
    for i in range(2):
        for norm in ("q_norm", "k_norm"):
            weights[f"layers.{i}.self_attn.{norm}.weight"] = mx.ones(HEAD_DIM)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(command, cache: Path) -> dict:
    environment = {**os.environ, "SPEC_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == 1, done.stdout + done.stderr  # rank 0 alone speaks
    return answers[0]


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("mode", ["lookup", "dspark"])
def test_two_processes_answer_like_one(tmp_path, model_type, mode):
    folder = write_target(tmp_path / "target", model_type)
    generate = [
        BIN / "spec",
        "generate",
        "w3 w14 w15 w9 w3 w14 w15",
        "--raw",
        "--json",
        "--max-draft",
        "full",
    ]
    n_tokens = 120 if mode == "lookup" else 40  # a random model repeats itself late
    generate += ["--model", folder, "--max-tokens", n_tokens]
    alone = run([*generate, "--mode", "baseline"], tmp_path)

    generate += ["--mode", mode]
    if mode == "dspark":
        generate += ["--drafter", write_dspark(tmp_path / "drafter"), "--drafter-bits", 16]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [BIN / "mlx.launch", "-n", 2, "--backend", "ring", "-p", port, "--"]
    split = run([*launch, *generate], tmp_path)
    assert split["mode"] == mode and split["draft_tokens"] > 0
    assert split["token_ids"] == alone["token_ids"]
