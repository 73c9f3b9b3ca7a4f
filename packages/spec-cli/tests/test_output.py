"""What becomes of the answer when stdout is closed, full, narrow in characters, or gone."""

import io
import json
import os
import subprocess
import sys
from errno import ENOSPC

import pytest
from rich.errors import MarkupError

from spec_cli import main, render
from spec_core import SpecError


class Full(io.StringIO):
    """A disk without space."""

    def flush(self):
        raise OSError(ENOSPC, "No space left on device")


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    def flush(self):
        raise BrokenPipeError


def said_with(stdout, monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "stdout", stdout)
    code = main.run([str(a) for a in arguments])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("rest", [(), ("--json",)])
@pytest.mark.parametrize(
    ("stdout", "message"), [(Full(), "No space left on device"), (None, "must be open")]
)
def test_an_answer_that_cannot_be_written_is_refused(
    tiny_folder, monkeypatch, capsys, stdout, message, rest
):
    arguments = ("generate", "Hi", "--model", tiny_folder, "--max-tokens", 2, "--max-draft", 1)
    code, err = said_with(stdout, monkeypatch, capsys, (*arguments, *rest))
    assert code == 1 and err.startswith("[output]") and message in err
    assert len(err.splitlines()) == 1


def test_tables_and_lines_take_the_same_way_out(spec, monkeypatch, capsys):
    for command in ("models", "doctor"):
        code, err = said_with(Full(), monkeypatch, capsys, (command,))
        assert code == 1 and "[output]" in err


@pytest.mark.skipif(sys.platform != "linux", reason="has no /dev/full")
@pytest.mark.parametrize("command", [("models", "--json"), ("models",), ("doctor",)])
def test_a_full_disk_is_one_line_and_exit_code_1_of_the_process_too(command):
    arguments = [sys.executable, "-c", "from spec_cli.entry import main; main()", *command]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, env=env)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        b"[output] Standard output must take the answer, and says: No space left on device."
    ]


def test_a_reader_that_leaves_ends_it_quietly(tiny_folder, monkeypatch):
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(errors, "close", lambda: None)
    arguments = ("generate", "Hi", "--model", str(tiny_folder), "--max-tokens", "2")
    assert main.run([*arguments, "--max-draft", "1"]) == 1
    assert errors.getvalue() == ""


def test_characters_that_stdout_lacks_are_replaced_or_escaped(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    render.stream("né\U0001f600")
    render.one_json({"text": "é\U0001f600"})
    first, second = narrow.buffer.getvalue().decode("ascii").split("{", 1)
    assert first == "n??"
    assert json.loads("{" + second) == {"text": "é\U0001f600"}


def test_a_lone_surrogate_in_a_name_is_shown_not_raised(capsys):
    render.one_json({"model": "\udcff"})
    render.table("t", ["name"], [["\udcff"]])
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == {"model": "\udcff"}


def test_names_that_look_like_markup_are_shown_as_they_are(spec, tmp_path):
    folder = tmp_path / "cache" / "converted" / "a[b] [bold]"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "[/x]"}))
    code, out, err = spec("models")
    assert code == 0, err
    assert "a[b] [bold]" in out and "[/x]" in out
    try:
        with render.progress("[/x].gguf") as step:
            step(1, 2)
    except MarkupError:
        pytest.fail("a file's name is no markup")


def test_a_closed_stderr_costs_only_the_remarks(tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Full())
    code = main.run(["generate", "Hi", "--model", str(tiny_folder), "--max-tokens", "2"])
    assert code == 0 and capsys.readouterr().out
    assert main.run(["generate", "Hi", "--model", "/no/such/folder"]) == 1


def test_tables_in_a_file_have_no_blanks_at_the_end(spec):
    for command in ("models", "doctor"):
        _, out, _ = spec(command)
        assert out and not [line for line in out.splitlines() if line != line.rstrip()]


def test_output_errors_are_errors_a_caller_can_catch(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SpecError):
        render.end_stream()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_models_text_commands_no_terminal(monkeypatch):
    said = "a\x1b]52;c;eA==\x07 \x9b2J\tb\r\n"
    for kind, shown in (
        (Terminal, "a\\x1b]52;c;eA==\\x07 \\x9b2J\tb\r\n"),
        (io.StringIO, said),
    ):
        monkeypatch.setattr(sys, "stdout", kind())
        render.stream(said)
        assert sys.stdout.getvalue() == shown
