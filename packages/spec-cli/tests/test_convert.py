import json

import spec_demo


def test_convert_makes_a_folder_that_generate_takes(spec, tmp_path):
    out = tmp_path / "model"
    code, _, err = spec("convert", spec_demo.target_gguf(), out)
    assert code == 0, err
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    code, _, err = spec("convert", spec_demo.target_gguf(), out)
    assert code == 1 and "--force" in err


def test_a_file_that_is_no_gguf_is_refused_in_one_line(spec, tmp_path):
    bad = tmp_path / "page.gguf"
    bad.write_text("<!DOCTYPE html>")
    code, out, err = spec("convert", bad, tmp_path / "out")
    assert code == 1 and out == "" and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_generate_takes_a_gguf_file_and_converts_it_once(spec, tmp_path):
    model = f"gguf:{spec_demo.target_gguf()}"
    common = ("--model", model, "--mode", "baseline", "--max-tokens", 1, "--json", "--raw")
    for _ in range(2):
        code, out, err = spec("generate", "Hi", *common)
        assert code == 0, err
        assert len(json.loads(out)["token_ids"]) == 1
    made = [p.name for p in (tmp_path / "cache" / "converted").iterdir() if p.is_dir()]
    assert len(made) == 1, made
