import getpass
import json
import os
from pathlib import Path

import pytest

from spec_cli import machine, opening, probe
from spec_core import LoadError
from spec_kernels.probe import Probe


@pytest.fixture(autouse=True)
def _small(monkeypatch, tiny_folder):
    """One family, and the tiny model in the embedded default's place."""
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")  # restored behind each probe
    monkeypatch.setattr(probe, "FAMILIES", ("qwen3_5",))
    open_target = opening.open_target
    monkeypatch.setattr(
        opening, "open_target", lambda _, **how: open_target(str(tiny_folder), **how)
    )
    monkeypatch.setattr(opening, "embedded_drafter", lambda: None)
    pair = opening.Opened.pair

    def lookup_for_dspark(self, wish):
        return pair(self, opening.Wish("lookup" if wish.mode == "dspark" else wish.mode))

    monkeypatch.setattr(opening.Opened, "pair", lookup_for_dspark)


def probed(spec):
    code, out, err = spec("doctor", "--probe", "--json")
    assert err == ""
    report = json.loads(out)
    return code, report, {p["name"]: p for p in report["probes"]}


def test_a_sound_machine_passes_everything_it_serves(spec):
    code, report, found = probed(spec)
    assert [p for p in found.values() if p["outcome"] == "fail"] == []
    assert code == 0 and report["counts"]["fail"] == 0
    planned = found["tiny qwen3_5, scripted"]
    assert planned["outcome"] == "pass" and "0 of" not in planned["detail"]
    assert {p["group"] for p in report["probes"]} == {"kernels", "decoding"}
    assert found["embedded default, exact, lookup, prompt 1"]["outcome"] == "pass"
    assert set(report) == {
        *("machine", "versions", "kernels", "problems", "probes", "counts"),
    }


def test_the_page_is_markdown_without_names_or_paths(spec, monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "jane")
    told = f"{tmp_path / 'jane' / 'models' / 'x.gguf'} and /opt/jane/lib/y.so are gone"
    monkeypatch.setattr(probe, "kernel_probes", lambda: iter([Probe("a", "fail", told, 1.0)]))
    code, out, err = spec("doctor", "--probe")
    assert code == 1 and err == ""
    lines = out.splitlines()
    assert lines[0] == "# spec doctor --probe"
    assert "| a | fail | 1.00 | …/x.gguf and …/y.so are gone |" in lines
    assert lines[-1].endswith(" pass, 1 fail, 0 skip")
    assert "jane" not in out and str(Path.cwd()) not in out and str(tmp_path) not in out
    if getpass.getuser() not in ("root", "mlx", "spec"):
        assert getpass.getuser() not in out


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("8/2x64 at 3 tok/s, a/b", "8/2x64 at 3 tok/s, a/b"),
        ('no "/home/jane/.cache/spec/x-1.json": gone', 'no "…/x-1.json": gone'),
        (r"C:\Users\jane\spec\x.py broke", "…/x.py broke"),
        ("two\n  lines", "two lines"),
        (f"{Path.home()} is full", "~ is full"),
        (f"{Path.home()}/models/a is bad", "…/a is bad"),
    ],
)
def test_paths_keep_their_last_part_alone(text, shown):
    assert probe.scrubbed(text) == shown


def test_ids_that_differ_fail_unless_the_plain_run_has_a_near_tie_there():
    class Run:
        def __init__(self, ids, ties=()):
            self.ids, self.ties = ids, list(ties)
            self.stats = type("S", (), dict.fromkeys(
                ("n_accepted", "n_drafted", "near_ties", "tokens_per_second"), 0))  # fmt: skip

    def compared(plain, other, **how):
        return probe._compared("x", plain, lambda: other, **how)

    assert compared(Run([1, 2, 3]), Run([1, 2, 3])).outcome == "pass"
    differing = compared(Run([1, 2, 3]), Run([1, 5, 3]))
    assert differing.outcome == "fail"
    assert differing.detail.startswith("ids differ from token 1 on; ")
    tied = compared(Run([1, 2, 3], [1]), Run([1, 5, 3]))
    assert tied.outcome == "pass" and tied.detail.endswith("ids part at token 1, a near tie")
    assert compared(Run([1, 2, 3], [2]), Run([1, 5, 3])).outcome == "fail"
    assert compared(Run([1, 2, 3], [1]), Run([1, 5, 3]), ties=False).outcome == "fail"
    assert "ids differ from token 2 on" in compared(Run([1, 2, 3]), Run([1, 2])).detail


def test_a_target_whose_rollback_is_wrong_fails(spec, monkeypatch):
    from spec_targets import MlxTarget

    commit = MlxTarget.commit

    def forgetful(self, cache, n_keep):
        commit(self, cache, max(n_keep - 1, 1) if n_keep > 2 else n_keep)

    monkeypatch.setattr(MlxTarget, "commit", forgetful)
    code, report, found = probed(spec)
    assert code == 1 and report["counts"]["fail"] >= 1
    assert found["tiny qwen3_5, scripted"]["outcome"] == "fail"


@pytest.mark.parametrize(("options", "setting"), [(["--probe"], "0"), ([], "1")])
def test_a_probe_takes_float32_products_in_float32_from_the_first_one_on(
    spec, monkeypatch, options, setting
):
    describe, settings = machine.describe, []

    def described():
        settings.append(os.environ["MLX_ENABLE_TF32"])
        return describe()

    monkeypatch.setattr(machine, "describe", described)
    monkeypatch.setattr(probe, "kernel_probes", lambda: iter(()))
    assert spec("doctor", *options)[0] == 0
    assert settings == [setting]


def test_without_an_embedded_default_its_part_is_skipped_with_the_reason(spec, monkeypatch):
    def missing(*_, **__):
        raise LoadError("[model] The embedded default is not installed.")

    monkeypatch.setattr(opening, "open_target", missing)
    code, _, found = probed(spec)
    assert code == 0 and found["embedded default"]["outcome"] == "skip"
    assert found["embedded default, exact"]["detail"].startswith("[model]")


def test_a_family_that_this_mlx_cannot_run_is_a_failure_not_an_error(spec, monkeypatch):
    monkeypatch.setattr(probe, "FAMILIES", ("none_such",))
    code, _, found = probed(spec)
    assert code == 1 and found["tiny none_such"]["outcome"] == "fail"


@pytest.mark.parametrize("path", ["/Users/Jane Doe/x y/spec", "C:\\Users\\Jane Doe\\x y\\spec"])
def test_a_quoted_path_with_spaces_keeps_its_last_part_alone(path):
    shown = probe.scrubbed(f'"{path}" must be a folder, got "a/b".')
    assert shown == '"…/spec" must be a folder, got "a/b".'
