"""Ctrl-C and an end from outside, while Python imports or tidies up."""

import os
import signal
import subprocess
import sys
import time

import pytest


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code as from a terminal: Ctrl-C is not ignored, and output to a pipe is buffered."""
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_ctrl_c_while_everything_is_imported_is_quiet():
    done = run(
        """
import builtins, spec_cli.entry
real = builtins.__import__
def interrupted(name, *rest):
    if name == "click":
        raise KeyboardInterrupt
    return real(name, *rest)
builtins.__import__ = interrupted
spec_cli.entry.main()
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Stopped.\n")


def test_the_entry_itself_imports_nothing_heavy():
    done = run("import spec_cli.entry, sys; print({'click', 'mlx', 'rich'} & set(sys.modules))")
    assert done.stdout == "set()\n"


COMMAND = """
import sys, spec_cli.entry, spec_cli.main
def command():
    {body}
spec_cli.main.main = command
sys.argv = ["spec"]
spec_cli.entry.main()
"""


def test_a_ctrl_c_that_a_finaliser_swallows_is_not_lost():
    body = """
    class Late:
        def __del__(self):
            raise KeyboardInterrupt
    late = Late()
    del late
    import time
    time.sleep(30)
    print("went on")
"""
    start = time.monotonic()
    done = run(COMMAND.format(body=body))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Stopped.\n")
    assert time.monotonic() - start < 25


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM between processes")
def test_an_end_from_outside_lets_files_in_the_making_be_removed():
    body = """
    import os, signal
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        print("tidied up")
"""
    done = run(COMMAND.format(body=body))
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "tidied up\n")


def test_a_current_folder_that_is_gone_is_told(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    code = f"import os; os.chdir({str(folder)!r}); os.rmdir({str(folder)!r}); "
    done = run(
        code + "import sys; sys.argv = ['spec', 'models']; import spec_cli.entry as e; e.main()"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == "[folder] The current folder must exist, and is gone. Go to another one.\n"
    )


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_stream_does_not_give_its_number_away(closed, tmp_path):
    """A file of weights got it, and MLX takes 0 for a file that could not be opened."""
    found = tmp_path / "found"
    code = f"""
import os, spec_cli.main, spec_cli.entry
def opens():
    number = os.open({str(found)!r}, os.O_WRONLY | os.O_CREAT)
    os.write(number, b"%d" % number)
spec_cli.main.main = opens
os.close({closed})
spec_cli.entry.main()
"""
    run(code)
    assert int(found.read_text()) > 2
