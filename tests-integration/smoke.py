"""One real action of every package: `python tests-integration/smoke.py spec-core`.

Needs nothing but the packages; used by `tools/floors` at both ends of the allowed versions and on
built wheels. The packages named must be installed; others are tried where they are.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = {
    "spec_core": "spec-core",
    "spec_kernels": "spec-kernels",
    "spec_drafters": "spec-drafters",
    "spec_calibrate": "spec-calibrate",
    "spec_convert": "spec-convert",
    "spec_demo": "spec-demo",
    "spec_targets": "spec-targets",
    "spec_server": "mlx-spec-server",
    "spec_cli": "mlx-spec-cli",
}
COMMANDS = "generate chat serve benchmark calibrate eval models doctor convert"
BIN = Path(sys.executable).parent


def main() -> None:
    """Try what is installed; any error ends it."""
    tried = []
    for module, distribution in PACKAGES.items():
        if find_spec(module) is None:
            continue
        with tempfile.TemporaryDirectory() as cache:
            os.environ["SPEC_CACHE_DIR"] = cache
            globals()[module]()
        tried.append(f"{distribution} {version(distribution)}")
    others = ("mlx", "mlx-lm", "transformers", "numpy", "fastapi", "click", "huggingface-hub")
    found = [f"{name} {shown}" for name in others if (shown := _version(name))]
    missing = [name for name in sys.argv[1:] if not any(name in one.split() for one in tried)]
    assert not missing, f"not installed: {missing}"
    print(f"ok: {', '.join(tried)}")
    print(f"on Python {sys.version.split()[0]} with {', '.join(found)}")


def spec_core() -> None:
    from spec_core import Pair, generate
    from spec_core.testing import ToyDrafter, ToyTarget, check_target

    check_target(ToyTarget(vocab_size=12), prompt=[1, 5, 2])
    target, ids = ToyTarget(vocab_size=12), []
    for drafter in (None, ToyDrafter(vocab_size=12)):
        rounds = generate(Pair(target, drafter), [1, 5, 2], max_tokens=30)
        ids.append([token for round_ in rounds for token in round_.tokens])
    assert ids[0] == ids[1] and len(ids[0]) == 30, ids


def spec_kernels() -> None:
    from spec_kernels.probe import probes

    found = [probe for probe in probes(race=False) if probe.outcome == "fail"]
    assert not found, found


def spec_drafters() -> None:
    from spec_core.registry import load
    from spec_core.testing import check_drafter

    check_drafter(load("spec_core.drafters", "lookup")(), vocab_size=50)


def spec_calibrate() -> None:
    from spec_calibrate import Store, best_cap, key_for, load_or_measure
    from spec_core import Pair
    from spec_core.testing import ToyDrafter, ToyTarget

    pair = Pair(ToyTarget(vocab_size=12), ToyDrafter(vocab_size=12))
    key = key_for(model="toy", quantisation="", kv_bits=16, drafter="toy", kernels="")
    store = Store(Path(os.environ["SPEC_CACHE_DIR"]))
    made = load_or_measure(pair, key, store=store, budget_s=0.2, notify=lambda _: None)
    assert 0 <= best_cap(made.curves, max_draft=4).cap <= 4


def spec_convert() -> None:
    said = _run(BIN / "spec-convert", "--help")
    assert "inspect" in said and "verify" in said, said
    if find_spec("spec_demo") is not None:
        import spec_demo

        gguf = spec_demo.target_gguf()
        if gguf is not None:
            assert "llama" in _run(BIN / "spec-convert", "inspect", gguf)


def spec_demo() -> None:
    import spec_demo

    folder = spec_demo.drafter_folder()
    assert folder is not None and (folder / "config.json").is_file()


def spec_targets() -> None:
    from spec_core import Pair, generate
    from spec_core.testing import ScriptedDrafter
    from spec_targets import MlxTarget
    from spec_targets.families import FAMILIES
    from spec_targets.tiny import VOCAB, tiny_model

    for name in ("llama", "gemma3_text", "qwen3_5", "lfm2"):
        target = MlxTarget(tiny_model(name), FAMILIES[name], name, 512, n_heads=4)
        plain = [t for r in generate(Pair(target), [5, 9, 2], max_tokens=20) for t in r.tokens]
        drafter = ScriptedDrafter(plain, 3, VOCAB, max_draft=4, wrong_at=(3,))
        drafted = generate(Pair(target, drafter), [5, 9, 2], max_tokens=20)
        assert [t for r in drafted for t in r.tokens] == plain, name


def spec_server() -> None:
    from spec_server import Settings

    assert Settings(port=0).host == "127.0.0.1"


def spec_cli() -> None:
    spec = BIN / "spec"
    assert _run(spec, "--version") == f"spec, version {version('mlx-spec-cli')}\n"
    for command in COMMANDS.split():
        assert "Usage: spec" in _run(spec, command, "--help")
    assert json.loads(_run(spec, "doctor", "--json"))["problems"] == []
    import spec_demo

    if spec_demo.target_gguf() is None:
        return
    common = ("--max-tokens", "6", "--max-draft", "2", "--json")
    ids = [
        json.loads(_run(spec, "generate", "Count to ten.", "--mode", mode, *common))["token_ids"]
        for mode in ("baseline", "dspark", "lookup")
    ]
    assert ids[0] == ids[1] == ids[2], ids
    _serve(spec)


def _serve(spec: Path) -> None:
    """Start a server, ask it once, stop it."""
    command = [str(spec), "serve", "--port", "0", "--mode", "lookup", "--max-draft", "2"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        deadline, url = time.monotonic() + 120, ""
        while not url and time.monotonic() < deadline:
            line = server.stderr.readline()
            assert line, "the server ended before it listened"
            url = next((word for word in line.split() if word.startswith("http://")), "")
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "model": "any"}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        for _ in range(60):
            try:
                with urllib.request.urlopen(request, timeout=120) as reply:
                    assert json.load(reply)["choices"][0]["message"]["content"]
                return
            except urllib.error.URLError:
                time.sleep(1)
        raise AssertionError("the server never answered")
    finally:
        server.terminate()
        server.wait(30)


def _run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
