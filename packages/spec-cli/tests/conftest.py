"""A tiny random llama with the first entries of the embedded default's tokenizer."""

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

import spec_demo
from spec_cli import caps, main
from spec_convert import convert

# The whole vocabulary takes half a second to load, and most tests load it more than once.
VOCAB = 2048


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory) -> Path:
    gguf = spec_demo.target_gguf()
    assert gguf is not None, f"install {spec_demo.WHEEL}"
    folder = tmp_path_factory.mktemp("demo") / "smollm2"
    convert(gguf, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, demo_folder) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(28)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    # Weak layers on strong embeddings: the model repeats itself now and then, so lookup drafts, and
    # is both right and wrong.
    weights = {
        name: (0.6 if "o_proj" in name or "down_proj" in name else 2) * array
        for name, array in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (demo_folder / name).is_file():
            shutil.copy(demo_folder / name, folder / name)
    (folder / "tokenizer.json").write_text(first_entries(demo_folder / "tokenizer.json"))
    return folder


def first_entries(path: Path) -> str:
    """A byte-level tokenizer.json whose vocabulary ends at VOCAB, with the merges that stay."""
    tokenizer = json.loads(path.read_text())
    kept = {token: i for token, i in tokenizer["model"]["vocab"].items() if i < VOCAB}
    tokenizer["model"]["vocab"] = kept
    merges = [m if isinstance(m, list) else m.split(" ") for m in tokenizer["model"]["merges"]]
    tokenizer["model"]["merges"] = [m for m in merges if "".join(m) in kept]
    return json.dumps(tokenizer)


@pytest.fixture
def spec(capsys, monkeypatch, tmp_path):
    """Run one command line; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("SPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # read at its import
    monkeypatch.setattr(caps, "BUDGET_S", 0.1)  # a rough calibration is enough here

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main.run([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call
