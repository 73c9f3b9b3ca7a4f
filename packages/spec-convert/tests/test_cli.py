import json
import os
import signal
import subprocess
import sys
import time

import gguf
import pytest
from click.testing import CliRunner

from spec_convert.cli import cli
from spec_convert.repack import HAS_LOOP

Kind = gguf.GGMLQuantizationType


def run(*args: object):
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def test_convert_then_verify_then_inspect(make_llama, tmp_path):
    source, out = make_llama(Kind.Q4_1), tmp_path / "out"
    done = run("convert", source, out)
    assert done.exit_code == 0 and "20 tensors" in done.stdout and "lossless" in done.stdout
    checked = run("verify", out, source)
    assert checked.exit_code == 0
    assert checked.stdout == "20 tensors compared, 20 equal, 0 rounded\n"
    shown = run("inspect", source)
    assert 'general.architecture = "llama"' in shown.stdout
    assert "blk.0.attn_q.weight  Q4_1  [64, 64]  2560 bytes" in shown.stdout


def test_the_version_says_whether_the_compiled_loop_is_there():
    shown = run("--version").stdout
    assert shown.endswith(", compiled loop\n" if HAS_LOOP else ", numpy alone\n")


def test_json_is_one_object_on_stdout(make_llama, tmp_path):
    report = json.loads(run("convert", make_llama(), tmp_path / "out", "--json").stdout)
    assert report["lossless"] is True and len(report["tensors"]) == 20
    inspected = json.loads(run("inspect", make_llama(), "--json").stdout)
    assert inspected["metadata"]["llama.block_count"] == 2
    assert inspected["tensors"][0].keys() == {"name", "type", "shape", "bytes"}


def test_the_report_has_a_line_for_each_tensor(make_llama, tmp_path):
    done = run("convert", make_llama(Kind.Q8_0), tmp_path / "out", "--report", "--dtype", "bf16")
    lines = done.stdout.splitlines()
    assert len(lines) == 22
    row = next(line for line in lines if line.startswith("blk.0.attn_q.weight")).split("\t")
    assert row[1:6] == ["Q8_0", "model.layers.0.self_attn.q_proj.weight", "BF16", "4352", "8192"]
    assert float(row[6]) > float(row[7]) > 0


def test_a_refusal_is_one_line_and_exit_code_1(tmp_path, make_llama):
    source = tmp_path / "page.gguf"
    source.write_text("<html>")
    for command in (["convert", source, tmp_path / "out"], ["inspect", source]):
        refused = run(*command)
        assert refused.exit_code == 1 and refused.stdout == ""
        assert refused.stderr.startswith("[gguf]") and refused.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="has no /dev/full")
def test_a_full_disk_behind_stdout_is_one_line_and_exit_code_1(make_llama, tmp_path):
    code = "from spec_convert.cli import main; main()"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for command in (["inspect"], ["inspect", "--json"], ["convert", str(tmp_path / "out")]):
        command.insert(1, str(make_llama()))
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                [sys.executable, "-c", code, *command], stdout=full, stderr=subprocess.PIPE, env=env
            )
        assert ended.returncode == 1
        assert ended.stderr == (
            b"[output] Standard output must take the report, and says: No space left on device.\n"
        )


def test_verify_fails_loudly(make_llama, tmp_path):
    source, out = make_llama(), tmp_path / "out"
    run("convert", source, out)
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\x00\x00\x80\x7f")
    failed = run("verify", out, source)
    assert failed.exit_code == 1 and "off by up to inf" in failed.stdout
    assert "Every tensor must match" in failed.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_terminated_run_leaves_nothing(make_llama, tmp_path):
    source = make_llama()
    code = (
        "import sys, time; from spec_convert import cli, convert\n"
        "def slow(*a, **k): k['progress'] = lambda *c: (open(sys.argv[-1] + '.go', 'w'), "
        "time.sleep(0.05)); return convert(*a, **k)\n"
        "cli.convert = slow; sys.argv[1:1] = ['convert']; cli.main()"
    )
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", code, source, out], env=os.environ)
    flag = tmp_path / "out.go"
    while not flag.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    flag.unlink()
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
