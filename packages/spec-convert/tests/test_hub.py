import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from spec_convert import ConvertError, convert
from spec_convert.hub import locate, part_names


def test_paths_and_files_of_local_folders_need_no_hub(make_llama, tmp_path):
    source = make_llama()
    assert locate(source) == locate(str(source)) == locate(f"gguf:{source}") == source
    convert(f"gguf:{source}", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


def test_a_file_on_the_hub_is_fetched_through_its_own_cache(make_llama, tmp_path, monkeypatch):
    calls: list[tuple[str, str]] = []

    def hf_hub_download(repo_id: str, filename: str) -> str:
        calls.append((repo_id, filename))
        return str(make_llama())

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=hf_hub_download)
    )
    convert("gguf:owner/repo/folder/tiny.gguf", tmp_path / "out")
    assert calls == [("owner/repo", "folder/tiny.gguf")]


def test_every_part_of_a_split_file_is_fetched(tmp_path, monkeypatch):
    def hf_hub_download(repo_id: str, filename: str) -> str:
        (tmp_path / filename).touch()
        return str(tmp_path / filename)

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=hf_hub_download)
    )
    assert locate("gguf:o/r/m-00002-of-00003.gguf").name == "m-00001-of-00003.gguf"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]


def test_without_the_extra_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConvertError, match=r"Install spec-convert\[hub\]"):
        locate("gguf:owner/repo/file.gguf")


def test_a_failed_download_is_one_line(monkeypatch):
    def hf_hub_download(repo_id: str, filename: str) -> str:
        raise RuntimeError("404\n\nEntry not found")

    monkeypatch.setitem(
        sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=hf_hub_download)
    )
    with pytest.raises(ConvertError, match='"file.gguf" of "owner/repo" .*: 404 Entry not found'):
        locate("gguf:owner/repo/file.gguf")


@pytest.mark.parametrize("name", ["gguf:", "gguf:owner", "gguf:owner/repo", "gguf:owner//x.gguf"])
def test_an_incomplete_name_is_refused(name):
    with pytest.raises(ConvertError, match="must be gguf:OWNER/REPOSITORY/FILE.gguf or a path"):
        locate(name)


def test_names_of_parts_come_from_any_part():
    assert part_names("m.gguf") == ["m.gguf"]
    assert part_names("m-00002-of-00002.gguf") == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert Path(part_names("a/b-00001-of-00001.gguf")[0]).name == "b-00001-of-00001.gguf"
