"""The examples: spec-core and spec-drafters inside runtimes that know nothing of each other."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.utils import load
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spec_core import LoadError, Pair, StatsMeter, generate
from spec_core.testing import check_target
from spec_drafters import LookupDrafter
from spec_drafters.draft_model import DraftModelDrafter
from spec_targets.tiny import VOCAB, build, tiny_config, tiny_model

EXAMPLES = Path(__file__).parents[1] / "examples"
FULL = ["full_attention"] * 3
PROMPT = [5, 9, 12, 7, 5, 9, 12, 7, 5, 9]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run(name: str, *arguments: object) -> str:
    """Run one example as a script."""
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ids_of(pair: Pair, prompt=PROMPT, n: int = 60, **settings) -> tuple[list[int], int]:
    """Emitted ids, and how many of them were drafts."""
    meter, ids = StatsMeter(), []
    for round_ in generate(pair, prompt, max_tokens=n, **settings):
        meter.add(round_)
        ids += round_.tokens
    return ids, meter.result().n_accepted


def save(folder: Path, model_type: str) -> Path:
    """A tiny random checkpoint of mlx-lm whose words are w0, w1, .."""
    config = tiny_config(model_type, layer_types=FULL)
    weights = dict(tree_flatten(build(config).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    words(VOCAB).save_pretrained(folder)
    return folder


def words(n: int, **special) -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i}": i for i in range(n)} | special
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


def test_a_runtime_of_its_own_decodes_with_fewer_rounds():
    said = run("own_runtime.py")
    plain, lookup = [int(word) for word in said.split() if word.isdecimal()][1:]
    assert plain == 199 and lookup < 100


def test_a_runtime_that_forgets_its_rollback_is_caught(monkeypatch):
    import own_runtime

    target = own_runtime.EngineTarget(own_runtime.Engine())

    def keep_all(cache, n_keep):
        cache.n_open = 0

    monkeypatch.setattr(target, "commit", keep_all)
    with pytest.raises(AssertionError):
        check_target(target, prompt=[1, 2, 3], atol=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_a_plain_model_of_mlx_lm_gives_its_own_ids_with_any_drafter(model_type):
    from mlx_lm_generate import TrimTarget

    model = tiny_model(model_type, layer_types=FULL)
    target = TrimTarget(model, model.model.embed_tokens, getattr(model, "lm_head", None))
    check_target(target, prompt=PROMPT, atol=1e-4)
    steps = generate_step(mx.array(PROMPT), model, max_tokens=60)
    reference = [int(token) for token, _ in islice(steps, 60)]
    assert ids_of(Pair(target))[0] == reference
    assert ids_of(Pair(target, LookupDrafter()))[0] == reference
    ids, n_accepted = ids_of(Pair(target, DraftModelDrafter(target, target)))
    assert ids == reference and n_accepted > 30  # a model agrees with itself


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("qwen3_5", "ArraysCache"), ("lfm2", "ArraysCache"), ("llama", "RotatingKVCache")],
)
def test_a_model_that_cannot_be_trimmed_is_refused_with_what_can(model_type, kind):
    from mlx_lm_generate import TrimTarget

    model = tiny_model(model_type)
    inner = getattr(model, "language_model", model)
    with pytest.raises(LoadError, match=f"must be KVCache, got .*{kind}.*Use spec-targets"):
        TrimTarget(model, inner.model.embed_tokens).make_cache()


def test_the_script_for_mlx_lm_says_what_mlx_lm_says(tmp_path):
    folder = save(tmp_path, "llama")
    prompt = " ".join(f"w{i}" for i in PROMPT)
    said = run("mlx_lm_generate.py", "--model", folder, "--prompt", prompt, "--max-tokens", 24)
    model, tokenizer, *_ = load(str(folder))
    steps = generate_step(mx.array(tokenizer.encode(prompt)), model, max_tokens=24)
    reference = [int(token) for token, _ in islice(steps, 24)]
    text, figures = said.splitlines()
    assert text.split() == tokenizer.decode(reference).split()
    assert figures.startswith("[24 tokens in ") and figures.endswith(" from drafts]")


# -- mlx-vlm, which the group vlm installs

IMAGE = 60  # the placeholder's id


@pytest.fixture(name="seeing")
def _seeing():
    """A tiny random Idefics3: two layers over the rows of one vision layer."""
    pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: tools/sync --group vlm")
    from mlx_vlm.models import idefics3

    text = idefics3.TextConfig(
        model_type="llama", hidden_size=32, intermediate_size=48, num_attention_heads=4,
        rms_norm_eps=1e-5, vocab_size=VOCAB, num_key_value_heads=2, num_hidden_layers=2,
    )  # fmt: skip
    vision = idefics3.VisionConfig(
        model_type="idefics3", hidden_size=16, num_attention_heads=2, patch_size=4,
        num_hidden_layers=1, intermediate_size=24, image_size=16,
    )  # fmt: skip
    model = idefics3.Model(
        idefics3.ModelConfig(
            text, vision, "idefics3", image_token_id=IMAGE, vocab_size=VOCAB, scale_factor=2
        )
    )
    mx.random.seed(3)

    def wide(a: mx.array) -> mx.array:
        return 3 * a.shape[-1] ** -0.5 * mx.random.normal(a.shape) if a.ndim > 1 else a

    model.update(tree_map(wide, model.parameters()))
    mx.eval(model.parameters())
    return model


def _picture(seed: int) -> mx.array:
    return mx.random.uniform(shape=(1, 1, 3, 16, 16), key=mx.random.key(seed))


def test_a_model_of_mlx_vlm_gives_its_own_ids_and_sees_the_picture(seeing):
    from mlx_vlm.generate.ar import generate_step as vlm_step
    from mlx_vlm_generate import VlmTarget

    language = seeing.language_model
    target = VlmTarget(seeing, language.embed_tokens, language.lm_head)
    check_target(target, prompt=PROMPT, atol=1e-4)
    prompt = [1, 2, *[IMAGE] * 4, 3, 4, 3, 4, 5]
    found = []
    for seed in (0, 1):
        picture = _picture(seed)
        steps = vlm_step(mx.array([prompt]), seeing, picture, None, max_tokens=60, temperature=0.0)
        reference = [int(token) for (token, _), _ in zip(steps, range(60), strict=False)]
        same = DraftModelDrafter(VlmTarget(seeing, language.embed_tokens, language.lm_head), target)
        for drafter, chunk in ((None, 2048), (LookupDrafter(), 4), (same, 7)):
            cache = target.look(mx.array([prompt]), picture)
            settings = {"cache": cache, "prefill_chunk": chunk}
            assert ids_of(Pair(target, drafter), prompt, **settings)[0] == reference
        found.append(reference)
    assert found[0] != found[1]


def test_a_model_of_mlx_vlm_that_needs_positions_of_its_own_is_refused(seeing):
    from mlx_vlm_generate import VlmTarget

    target = VlmTarget(seeing, seeing.language_model.embed_tokens, seeing.language_model.lm_head)
    found = SimpleNamespace(inputs_embeds=mx.zeros((1, 3, 32)), position_ids=mx.zeros((3, 1, 3)))
    target.whole = SimpleNamespace(get_input_embeddings=lambda *_, **__: found)
    with pytest.raises(LoadError, match=r"must need embeddings alone, got \['position_ids'\]"):
        target.look(mx.array([[1, 2, 3]]), None)


def test_the_script_for_mlx_vlm_answers_about_a_picture_file(seeing, tmp_path, monkeypatch, capsys):
    import mlx_vlm_generate
    import numpy as np
    from mlx_vlm.models.idefics3.processing_idefics3 import Idefics3Processor
    from PIL import Image
    from transformers.image_processing_utils import BaseImageProcessor

    class Pixels(BaseImageProcessor):
        """16 x 16 pixels in one piece."""

        def __call__(self, images, **_):
            pixels = np.asarray(images[0][0].resize((16, 16)), np.float32) / 255
            values = pixels.transpose(2, 0, 1)[None, None]
            return {"pixel_values": values, "rows": [[0]], "cols": [[0]]}

    tokenizer = words(
        54, **{"<fake_token_around_image>": 54, "<end_of_utterance>": 55, "<image>": IMAGE}
    )
    tokenizer.eos_token = "w0"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for m in messages %}{% for c in m.content %}{{ '<image>' if c.type == 'image' "
    template += "else ' ' + c.text }}{% endfor %}{% endfor %}"
    processor = Idefics3Processor(Pixels(), tokenizer, image_seq_len=4, chat_template=template)
    monkeypatch.setattr(mlx_vlm_generate, "load", lambda name: (seeing, processor))
    said = []
    for color in ("red", "blue"):
        Image.new("RGB", (20, 20), color).save(tmp_path / f"{color}.png")
        arguments = ["--image", str(tmp_path / f"{color}.png"), "--prompt", "w3 w4 w3 w4"]
        monkeypatch.setattr(sys, "argv", ["x", *arguments, "--max-tokens", "20"])
        mlx_vlm_generate.main()
        text, figures = capsys.readouterr().out.splitlines()[-2:]
        assert len(text.split()) >= 10 and "tokens in" in figures
        said.append(text)
    assert said[0] != said[1]
