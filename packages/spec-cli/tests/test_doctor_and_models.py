import json
from importlib import metadata

import spec_demo
from spec_cli.commands import doctor as doctor_module


def test_doctor_names_machine_versions_and_no_problem(spec):
    code, out, err = spec("doctor", "--json")
    report = json.loads(out)
    assert code == 0 and report["problems"] == [] and err == ""
    assert report["machine"]["backend"] in ("cpu", "cuda", "metal")
    assert all(report["versions"].values())
    required = [r for r in metadata.requires("mlx-spec-cli") or () if "extra ==" not in r]
    ours = {r.split(">")[0] for r in required if "spec-" in r}
    assert "spec-core" in ours and ours <= report["versions"].keys()
    code, out, _ = spec("doctor")
    assert code == 0 and "no problems found" in out and "mlx-lm" in out


def test_doctor_exits_1_when_something_is_missing(spec, monkeypatch):
    monkeypatch.setattr(doctor_module, "_PACKAGES", ("mlx", "no-such-package"))
    code, out, _ = spec("doctor")
    assert code == 1 and 'problem: "no-such-package" is not installed.' in out


def test_doctor_says_which_blas_runs(spec, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libopenblas.so.0")
    assert doctor_module._blas() == "openblas"
    monkeypatch.setenv("LD_PRELOAD", "")
    assert doctor_module._blas() == "reference"


def test_doctor_says_how_to_a_faster_blas(spec, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_module.sys, "platform", "linux")
    monkeypatch.setattr(doctor_module.this_machine, "describe", lambda: {"backend": "cpu"})
    monkeypatch.setenv("LD_PRELOAD", "")
    library = tmp_path / "cpu-blas" / "libspec_blas.so"
    monkeypatch.setattr(doctor_module.env, "built_blas", lambda: library)
    _, out, _ = spec("doctor")
    assert "note: MLX on this machine uses the slow reference BLAS" in out
    assert f"run tools/cpu-blas/build, then export LD_PRELOAD={library}" in out
    assert "for float weights (packed ones use none)" in out
    library.parent.mkdir()
    library.write_bytes(b"")
    _, out, _ = spec("doctor")
    assert f"A faster one is built: export LD_PRELOAD={library}" in out


def test_models_lists_the_embedded_default_and_what_was_converted(spec, tmp_path):
    folder = tmp_path / "cache" / "converted" / "thing-123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "mystery"}')
    code, out, _ = spec("models", "--json")
    found = {m["name"]: m for m in json.loads(out)["on_disk"]}
    assert code == 0
    assert found[spec_demo.NAME]["runs"] is True and found[spec_demo.NAME]["where"] == "embedded"
    assert found["thing-123"]["runs"] is False and found["thing-123"]["model_type"] == "mystery"
    code, out, _ = spec("models")
    assert code == 0 and "thing-123" in out


def test_models_lists_known_pairs_and_what_lm_studio_holds(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".lmstudio" / "models" / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    code, out, _ = spec("models", "--json")
    report = json.loads(out)
    assert code == 0 and "owner/name" in [m["name"] for m in report["on_disk"]]
    pairs = {pair["id"]: pair for pair in report["pairs"]}
    assert pairs["qwen3-4b"]["dspark"] == "deepseek-ai/dspark_qwen3_4b_block7"
    code, out, _ = spec("models")
    assert code == 0 and "known pairs" in out and "best cap" in out
    other = {"head": "RedHatAI/Qwen3-8B-speculator.eagle3", "target": "Qwen3-8B", "mode": "eagle3"}
    assert other in report["other_drafters"]
    assert "other drafters" in out and other["head"] in out


def test_a_table_that_no_terminal_shows_is_not_folded(spec):
    _, out, _ = spec("models")
    (line,) = [line for line in out.splitlines() if "Nemotron-3.5" in line]
    assert line.split() == [
        "mlx-community/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-4bit",
        "dspark",
        "mlx-community/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-DSpark-bf16",
        "3",
    ]


def test_a_cache_that_cannot_be_written_is_a_problem_with_its_remedy(spec, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, out, _ = spec("doctor", "--json")
    [problem] = json.loads(out)["problems"]
    assert code == 1 and "must be a writable folder" in problem and "SPEC_CACHE_DIR" in problem
