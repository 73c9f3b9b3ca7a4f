"""What the pages say can be typed: commands and Python of README.md and docs/*.md.

Every `spec` command is parsed in the ordinary run, so each option exists; Python blocks run as they
stand; whole shell blocks run with `-m slow`. What is said about a block stands above it, as a
comment of the page: `<!-- not run: reason -->`, `<!-- serves -->` for a server that is started and
stopped, `<!-- slow -->`, or `<!-- test: text = VALUE -->` for a replacement. VALUE is one of
those of `stand_ins`.
"""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import spec_demo
from spec_cli.main import cli
from spec_core import FixedCap, Pair
from spec_drafters import LookupDrafter
from spec_server import Served, Server, Settings
from spec_targets import load_target
from spec_targets.tiny import build, tiny_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BIN = Path(sys.executable).parent
MOST_LINES = 150


@dataclass(frozen=True)
class Block:
    """A fenced block and what the comments above it say."""

    where: str
    language: str
    text: str
    marks: tuple[str, ...]

    def mark(self, name: str) -> str | None:
        """What follows "name:" in a comment above; None without one."""
        said = [m.removeprefix(name).lstrip(": ") for m in self.marks if m.startswith(name)]
        return said[0] if said else None

    def filled(self, values: dict[str, str]) -> str:
        """The text with the replacements that the page names."""
        text = self.text
        for mark in self.marks:
            if mark.startswith("test:"):
                old, _, name = mark.removeprefix("test:").rpartition(" = ")
                assert old.strip() in text, f"{self.where}: nothing to replace by {name}"
                for key, value in values.items():
                    name = name.replace(key, value)
                text = text.replace(old.strip(), name.strip())
        return text


def blocks(language: str) -> list[Block]:
    """Every block of a language, over all pages."""
    return [b for page in PAGES for b in _blocks_of(page) if b.language == language]


def _blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    marks: list[str] = []
    language, lines, start = None, [], 0
    for n, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if language is None and line.startswith("```"):
            language, lines, start = line[3:].strip(), [], n
        elif language is not None and line.startswith("```"):
            where = f"{page.relative_to(ROOT).as_posix()}:{start}"
            found.append(Block(where, language, "\n".join(lines) + "\n", tuple(marks)))
            language, marks = None, []
        elif language is not None:
            lines.append(line)
        elif match := re.fullmatch(r"<!-- (.*) -->", line.strip()):
            marks.append(match[1])
        elif line.strip():
            marks = []
    return found


def commands(text: str) -> list[list[str]]:
    """The words of each `spec` command in a shell block."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if "spec" in words and words[0] not in ("pip", "cd"):
            words = words[words.index("spec") + 1 :]
            stops = [i for i, w in enumerate(words) if w in (">", "|", "&", "&&", ";", "2>")]
            found.append(words[: stops[0]] if stops else words)
    return found


SHELL, PYTHON = blocks("sh"), blocks("python")
SPEC = [(b.where, words) for b in SHELL for words in commands(b.text)]


def _ids(block: Block) -> str:
    return block.where


def test_the_pages_hold_commands_and_python():
    assert len(SHELL) > 10 and len(PYTHON) > 5 and len(SPEC) > 20
    assert all(not mark.rpartition(":")[2].isspace() for b in SHELL for mark in b.marks)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_is_short_and_its_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(("where", "words"), SPEC, ids=[f"{w} {' '.join(c)}" for w, c in SPEC])
def test_every_option_of_a_command_exists(where, words):
    if words[0].startswith("-"):
        assert words[0] in ("--help", "--version")
        return
    command = cli.commands[words[0]]
    command.make_context(words[0], list(words[1:]))  # raises on what it does not know


def test_the_picture_of_the_round_is_what_its_script_draws():
    path = ROOT / "docs/images/round.py"
    module = importlib.util.module_from_spec(
        found := importlib.util.spec_from_file_location("round_picture", path)
    )
    found.loader.exec_module(module)
    assert module.OUT.read_text(encoding="utf-8") == module.picture()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, byte_words) -> Path:
    """A checkpoint of a tiny random llama, with a byte-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("docs") / "tiny"
    shutil.copytree(byte_words, folder)
    config = tiny_config("llama", vocab_size=257, max_position_embeddings=4096)
    config["eos_token_id"] = 0
    weights = dict(tree_flatten(build(config).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def port(tiny) -> int:
    """Port of a server of the tiny model, with the key that the pages use."""

    def load() -> Served:
        target, tokenizer = load_target(tiny)
        pair = Pair(target, LookupDrafter(min_match=1), tokenizer)
        return Served(pair, "tiny", "lookup", lambda wish: FixedCap(4 if wish is None else wish))

    with Server(load, Settings(port=0, default_max_tokens=24)) as running:
        yield int(running.url.rpartition(":")[2])


@pytest.fixture
def stand_ins(tiny, port, monkeypatch, tmp_path) -> dict[str, str]:
    """What pages' replacements stand for; the block runs in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "question.txt").write_text("one two one two one")
    return {
        "TINY": str(tiny),
        "PORT": str(port),
        "GGUF": str(spec_demo.target_gguf()),
        "HEAD": str(spec_demo.drafter_folder()),
        "ROOT": str(ROOT),
        "CALM": "max_tokens=200, frequency_penalty=2.0",  # a random model loves one blank too much
    }


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _slow_where_marked(blocks):
    return [
        pytest.param(b, id=_ids(b), marks=[pytest.mark.slow] if "slow" in b.marks else [])
        for b in blocks
    ]


@pytest.mark.parametrize("block", _slow_where_marked(PYTHON))
def test_python_runs_as_it_stands(block, stand_ins):
    if (reason := block.mark("not run")) is not None:
        pytest.skip(reason)
    _run(sys.executable, "-c", block.filled(stand_ins))


def _plain(block: Block) -> bool:
    return block.mark("not run") is None and "serves" not in block.marks


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in SHELL if _plain(b)], ids=_ids)
def test_a_shell_block_runs(block, stand_ins):
    _run("bash", "-euo", "pipefail", "-c", block.filled(stand_ins))


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in SHELL if "serves" in b.marks], ids=_ids)
def test_a_server_block_serves_until_it_is_told_to_end(block, stand_ins):
    command = ["bash", "-euo", "pipefail", "-c", f"exec {block.filled(stand_ins).strip()} --port 0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        guard = threading.Timer(300, server.kill)
        guard.start()
        said = ""
        for line in server.stderr:
            said += line
            if " on http://" in line:
                break
        assert " on http://" in said, said
        time.sleep(0.5)
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(60)
        guard.cancel()
    assert server.returncode in (0, -signal.SIGTERM)  # the shell's or the server's own way out


@pytest.mark.parametrize(
    "block", [b for b in SHELL + PYTHON if b.mark("not run") is not None], ids=_ids
)
def test_what_is_not_run_says_why(block):
    assert len(block.mark("not run")) > 10
