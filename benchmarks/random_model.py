"""Writes the folder of a model with random weights: speeds of a large model without its download.

    uv run benchmarks/random_model.py --shape qwen3-8b --bits 4 --tokenizer FOLDER OUT

OUT opens as any checkpoint does, with `load_target` and with `spec serve --model OUT`. The same
shape, bits, vocabulary and seed give the same weights on one backend. Weights are drawn and
written part by part, a shard each: a layer, the embedding, the head. Most memory goes to the
largest matrix, which is drawn in float32: 1.3 GB for qwen3-8b with a vocabulary of 49152, three
times as much with its own. What such a model says means nothing, and what a drafter guesses of it
says nothing about texts.
"""

import argparse
import json
import shutil
from collections import deque
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from spec_targets import MlxTarget
from spec_targets.compiled import RACED, TRIED_AFTER
from spec_targets.load import family_for

QWEN3_8B = qwen3.ModelArgs(
    model_type="qwen3",
    hidden_size=4096,
    num_hidden_layers=36,
    intermediate_size=12288,
    num_attention_heads=32,
    rms_norm_eps=1e-6,
    vocab_size=151936,
    num_key_value_heads=8,
    max_position_embeddings=40960,
    rope_theta=1e6,
    head_dim=128,
    tie_word_embeddings=False,
)
TINY = replace(
    QWEN3_8B,
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=128,
    num_attention_heads=2,
    vocab_size=256,
    num_key_value_heads=1,
    max_position_embeddings=2048,
    head_dim=32,
)
SHAPES = {"qwen3-8b": QWEN3_8B, "tiny": TINY}
WARM_UP = TRIED_AFTER + RACED + 1  # blocks of a width until a target has settled how to run it
BITS = (4, 8, 16)
GROUP = 64
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def lazy_model(args: Any, bits: int, seed: int = 0) -> nn.Module:
    """A random model in bfloat16, quantised in groups of 64 unless `bits` is 16.

    Nothing is drawn before its parameters are evaluated, all together or part by part.
    """
    mx.random.seed(seed)
    model = import_module(f"mlx_lm.models.{args.model_type}").Model(args)
    model.set_dtype(mx.bfloat16)
    if bits != 16:
        nn.quantize(model, group_size=GROUP, bits=bits)
    return model


def random_target(args: Any, bits: int) -> MlxTarget:
    """Such a model behind the contract, in memory; the same weights each time."""
    model = lazy_model(args, bits)
    mx.eval(model.parameters())
    model.eval()
    family = family_for(args.model_type)
    return MlxTarget(model, family, args.model_type, n_heads=args.num_attention_heads)


def parts(model: nn.Module) -> deque[dict[str, mx.array]]:
    """The model's parameters by layer, and by module outside the layers."""
    named: list[tuple[str, Any]] = tree_flatten(model.parameters())  # pyright: ignore[reportAssignmentType]
    found: dict[str, dict[str, mx.array]] = {}
    for name, array in named:
        steps = name.split(".")
        depth = 3 if "layers" in steps else len(steps) - 1
        found.setdefault(".".join(steps[:depth]), {})[name] = array
    return deque(found.values())


def write(out: Path, args: qwen3.ModelArgs, bits: int, tokenizer: Path, seed: int = 0) -> int:
    """Write the checkpoint; returns its bytes of weights.

    The config comes last: a folder that was interrupted has none, and no loader opens it.

    Raises:
        FileExistsError: `out` exists.
        ValueError: `tokenizer` says nothing of its vocabulary.
    """
    n_vocab, ends = vocabulary(tokenizer)
    args = replace(args, vocab_size=n_vocab)
    out.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, out / name)
    left = parts(lazy_model(args, bits, seed))
    where: dict[str, str] = {}
    n_bytes, count = 0, len(left)
    for index in range(1, count + 1):
        arrays = left.popleft()
        shard = f"model-{index:05}-of-{count:05}.safetensors"
        for name in arrays:  # one by one: each is drawn in float32 first
            mx.eval(arrays[name])
        mx.save_safetensors(str(out / shard), arrays, {"format": "mlx"})
        where |= dict.fromkeys(arrays, shard)
        n_bytes += sum(array.nbytes for array in arrays.values())
        arrays.clear()
        mx.clear_cache()
    config = {**asdict(args), "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
    if ends is not None:
        config["eos_token_id"] = ends
    if bits != 16:
        config["quantization"] = {"group_size": GROUP, "bits": bits}
    index_file = {"metadata": {"total_size": n_bytes}, "weight_map": where}
    put(out / "model.safetensors.index.json", index_file)
    put(out / "config.json", config)
    return n_bytes


def put(path: Path, value: dict[str, Any]) -> None:
    """Write JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def vocabulary(folder: Path) -> tuple[int, int | list[int] | None]:
    """Rows of the embedding and the ids that end a text, as the tokenizer's folder states them.

    A config.json beside the tokenizer counts first: models pad their tables.

    Raises:
        ValueError: the folder has neither a config with a vocabulary nor a tokenizer.json.
    """
    config = read(folder / "config.json")
    found = config.get("vocab_size")
    if found is None:
        tokenizer = read(folder / "tokenizer.json")
        ids = list(tokenizer.get("model", {}).get("vocab", {}).values())
        ids += [added["id"] for added in tokenizer.get("added_tokens", ())]
        found = max(ids, default=-1) + 1
    if not found:
        raise ValueError(
            f'[random-model] "{folder}" must hold a config.json with "vocab_size" or a '
            "tokenizer.json. Give the folder of a checkpoint or of its tokenizer."
        )
    return found, config.get("eos_token_id")


def read(path: Path) -> dict[str, Any]:
    """JSON of a file, empty without one."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--bits", type=int, choices=BITS, default=4, help="16 is bfloat16")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder that has its files")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        n_bytes = write(given.out, SHAPES[given.shape], given.bits, given.tokenizer, given.seed)
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))
    print(f"{given.out}: {given.shape}, {given.bits} bits, {n_bytes / 1e9:.2f} GB of weights")


if __name__ == "__main__":
    main()
