"""Built wheels in empty environments: what a stranger installs works without the workspace."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = '''
import mlx.core as mx
from spec_core import Pair, StatsMeter, TargetOutput, generate
from spec_core.testing import check_target
from spec_drafters import LookupDrafter


class Cache:
    def __init__(self):
        self.tokens, self.n_open = mx.zeros((0,), mx.int32), 0

    offset = property(lambda self: self.tokens.shape[0] - self.n_open)
    is_open = property(lambda self: self.n_open > 0)
    nbytes = property(lambda self: self.tokens.nbytes)


class MyTarget:
    """Counts to ten over and over: a whole target in a page."""

    vocab_size, hidden_size, n_layers = 10, 4, 1
    context_length = tap_refusal = exact_refusal = None

    def make_cache(self):
        return Cache()

    def prefill(self, tokens, cache, *, taps=()):
        output = self.verify(mx.array(tokens, mx.int32), cache, taps=taps)
        self.commit(cache, len(tokens))
        return TargetOutput(output.logits[-1:], output.taps)

    def verify(self, block, cache, *, taps=()):
        from spec_core import StateError

        if cache.is_open:
            raise StateError("open")
        cache.tokens, cache.n_open = mx.concatenate([cache.tokens, block]), block.shape[0]
        logits = 9.0 * ((block[:, None] + 1) % 10 == mx.arange(10)[None]).astype(mx.float32)
        return TargetOutput(logits, tuple(self.embed(block) for _ in taps))

    def commit(self, cache, n_keep):
        from spec_core import StateError

        if not cache.is_open:
            raise StateError("closed")
        if not 0 <= n_keep <= cache.n_open:
            raise ValueError(n_keep)
        cache.tokens, cache.n_open = cache.tokens[: cache.offset + n_keep], 0

    def embed(self, tokens):
        return mx.ones((tokens.shape[0], 4))

    def unembed(self, hidden):
        return mx.zeros((hidden.shape[0], 10))


check_target(MyTarget(), prompt=[1, 2, 3, 4])
meter, ids = StatsMeter(), []
for round_ in generate(Pair(MyTarget(), LookupDrafter()), [7, 8, 9], max_tokens=60):
    meter.add(round_)
    ids += round_.tokens
assert ids == [n % 10 for n in range(60)], ids
assert meter.result().n_rounds < 25, meter.result()
print("ok", meter.result().n_rounds)
'''


def run(*command, **options):
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> Path:
    """A folder with the wheels of every package, built without workspace sources."""
    folder = tmp_path_factory.mktemp("wheels")
    run("uv", "build", "--all-packages", "--wheel", "--no-sources", "-o", folder, cwd=ROOT)
    return folder


def environment(tmp_path, wheels, *requirements) -> Path:
    """An empty environment with only these requirements; returns its Python."""
    run("uv", "venv", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    run("uv", "pip", "install", "--python", python, "--find-links", wheels, *requirements)
    run("uv", "pip", "check", "--python", python)
    return python


def test_core_and_drafters_alone_run_the_loop_on_a_users_own_target(tmp_path, wheels):
    backend = ["mlx[cpu]"] if sys.platform == "linux" else ["mlx"]
    core, drafters = next(wheels.glob("spec_core-*")), next(wheels.glob("spec_drafters-*"))
    python = environment(tmp_path, wheels, core, drafters, *backend)
    installed = run("uv", "pip", "list", "--python", python)
    assert "mlx-lm" not in installed and "transformers" not in installed
    script = tmp_path / "example.py"
    script.write_text(EXAMPLE)
    assert run(python, script, cwd=tmp_path).startswith("ok")


def test_convert_alone_needs_no_mlx(tmp_path, wheels):
    python = environment(tmp_path, wheels, next(wheels.glob("spec_convert-*")))
    assert "mlx" not in run("uv", "pip", "list", "--python", python).lower()
    shown = run(tmp_path / "env" / "bin" / "spec-convert", "--help", cwd=tmp_path)
    assert "inspect" in shown and "verify" in shown


@pytest.mark.parametrize("name", ["spec_core", "spec_drafters", "spec_targets", "spec_demo"])
def test_wheels_carry_their_type_marker(wheels, name):
    import zipfile

    with zipfile.ZipFile(next(wheels.glob(f"{name}-*"))) as wheel:
        assert f"{name}/py.typed" in wheel.namelist()
