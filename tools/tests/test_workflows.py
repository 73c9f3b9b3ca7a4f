"""CI calls the tools and nothing else, with pinned actions and no more rights than reading."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_there_is_one_for_linux_for_metal_and_for_releases():
    assert [path.stem for path in WORKFLOWS] == ["linux", "metal", "release"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_steps_call_tools_that_exist(path):
    commands = re.findall(r"^\s*- run: (.*)$", path.read_text(), re.MULTILINE)
    assert commands and "run: |" not in path.read_text()
    for command in commands:
        tool = ROOT / command.split()[0]
        assert tool.parent == ROOT / "tools" and os.access(tool, os.X_OK), command


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_rights_are_least(path):
    text = path.read_text()
    for action in re.findall(r"uses: (\S+)", text):
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+\.\d+)?", action), action
    assert re.findall(r"permissions:\n((?:  .*\n)+)", text) == ["  contents: read\n"]
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
    assert "secrets." not in text and "pull_request_target" not in text


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_job_ends_by_itself(path):
    text = path.read_text()
    assert text.count("runs-on:") == text.count("timeout-minutes:")


def test_a_release_of_convert_makes_wheels_of_its_loop_on_every_system():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    job = text.partition("\n  loop:\n")[2]
    for system in ("ubuntu-24.04,", "ubuntu-24.04-arm", "macos-15,", "macos-15-intel", "windows-"):
        assert system in job
    assert "package-dir: packages/spec-convert\n" in job
    project = tomllib.loads((ROOT / "packages/spec-convert/pyproject.toml").read_text())
    settings = project["tool"]["cibuildwheel"]
    assert settings["environment"] == {"SPEC_CONVERT_LOOP": "required"}
    tested = settings["test-command"].removeprefix("pytest {package}/")
    assert (ROOT / "packages/spec-convert" / tested).is_file()


def build(tag: str) -> tuple[int, str]:
    command = [str(ROOT / "tools" / "build"), *([tag] if tag else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("", "Name a tag such as spec-core-v0.4.0."),
        ("spec-none-v0.1.0", '[build] No package "spec-none".'),
        ("spec-core-v99.0.0", "spec-core/pyproject.toml must say version 99.0.0"),
    ],
)
def test_a_tag_that_names_no_version_of_ours_is_refused(tag, words):
    status, said = build(tag)
    assert status != 0 and words in said
