import io
import json
import sys

import pytest

KEYS = {
    "text", "token_ids", "prompt_tokens", "finish_reason", "mode", "drafter", "max_draft",
    "acceptance_length", "acceptance_rate", "rounds", "accepted_by_position", "draft_tokens",
    "tokens_per_second", "prefill_seconds", "decode_seconds", "total_seconds",
    "peak_memory_bytes", "backend", "exact", "near_ties", "model",
}  # fmt: skip


def answer(spec, tiny_folder, *arguments):
    cap = () if "--max-draft" in arguments else ("--max-draft", "full")
    code, out, err = spec(
        "generate", "Name three rivers.", "--model", tiny_folder, "--max-tokens", 24, "--json",
        *cap, *arguments,
    )  # fmt: skip
    assert code == 0, err
    return json.loads(out)


def test_json_is_one_object_with_the_documented_keys(spec, tiny_folder):
    result = answer(spec, tiny_folder)
    assert set(result) == KEYS
    assert result["mode"] == "lookup" and result["drafter"] == "lookup"
    assert result["finish_reason"] == "length" and len(result["token_ids"]) == 24


def test_modes_give_the_same_ids(spec, tiny_folder):
    baseline = answer(spec, tiny_folder, "--mode", "baseline")
    assert baseline["drafter"] is None and baseline["draft_tokens"] == 0
    for cap in (0, 1, 3, "full"):
        lookup = answer(spec, tiny_folder, "--mode", "lookup", "--max-draft", cap)
        assert lookup["token_ids"] == baseline["token_ids"]
        assert (lookup["draft_tokens"] > 0) == (cap != 0)  # otherwise nothing was shown
    assert 0 < lookup["acceptance_rate"] < 1 and lookup["max_draft"] == 32


def test_the_cap_is_pinned_and_a_larger_one_is_cut_with_a_notice(spec, tiny_folder):
    assert answer(spec, tiny_folder, "--max-draft", 0)["draft_tokens"] == 0
    code, out, err = spec(
        "generate", "Hi", "--model", tiny_folder, "--max-tokens", 2, "--json", "--max-draft", 99
    )
    assert code == 0 and "--max-draft 99 is cut" in err and json.loads(out)["max_draft"] == 32


def test_text_goes_to_stdout_and_one_line_of_statistics_to_stderr(spec, tiny_folder):
    code, out, err = spec(
        "generate", "Hi", "--model", tiny_folder, "--max-draft", "full", "--max-tokens", 8
    )
    assert code == 0 and out.endswith("\n") and len(err.strip().splitlines()) == 1
    assert "8 tokens" in err and "tok/s" in err and "lookup" in err
    code, out_without, err = spec(
        "generate",
        "Hi",
        "--model",
        tiny_folder,
        "--max-draft",
        "full",
        "--max-tokens",
        8,
        "--no-stats",
    )
    assert (code, out_without, err) == (0, out, "")


def test_streamed_text_equals_the_json_text(spec, tiny_folder):
    result = answer(spec, tiny_folder)
    _, out, _ = spec("generate", "Name three rivers.", "--model", tiny_folder, "--max-tokens", 24)
    assert out == result["text"] + "\n"


def test_prompts_come_from_arguments_files_and_stdin(spec, tiny_folder, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("Name three rivers.")
    want = answer(spec, tiny_folder)["token_ids"]
    common = ("--model", tiny_folder, "--max-tokens", 24, "--json")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Name three rivers."))
    for arguments in ((f"@{file}",), ("-",), ("--prompt", "Name three rivers.")):
        code, out, err = spec("generate", *arguments, *common)
        assert code == 0, err
        assert json.loads(out)["token_ids"] == want


def test_seeds_repeat_and_differ(spec, tiny_folder):
    hot = ("--temperature", "1.5")
    first = answer(spec, tiny_folder, *hot, "--seed", 1)["token_ids"]
    assert answer(spec, tiny_folder, *hot, "--seed", 1)["token_ids"] == first
    assert answer(spec, tiny_folder, *hot, "--seed", 2)["token_ids"] != first
    assert (
        answer(spec, tiny_folder, *hot)["token_ids"] != answer(spec, tiny_folder, *hot)["token_ids"]
    )


def test_options_change_what_they_name(spec, tiny_folder):
    plain = answer(spec, tiny_folder)
    assert (
        answer(spec, tiny_folder, "--system", "Be brief.")["prompt_tokens"]
        != plain["prompt_tokens"]
    )
    assert answer(spec, tiny_folder, "--raw")["prompt_tokens"] < plain["prompt_tokens"]
    assert answer(spec, tiny_folder, "--exact")["exact"] is True
    greedy = answer(spec, tiny_folder, "--temperature", 2, "--top-k", 1)
    assert greedy["token_ids"] == plain["token_ids"]
    words = plain["text"]
    stop = words[len(words) // 2 : len(words) // 2 + 3]
    cut = answer(spec, tiny_folder, "--stop", stop)
    assert cut["finish_reason"] == "stop" and cut["text"] == words[: words.index(stop)]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("generate",), 2, "Give one PROMPT."),
        (("generate", "a", "--prompt", "b"), 2, "Give one PROMPT."),
        (("generate", ""), 2, "The prompt must hold some text"),
        (("generate", "  \n"), 2, "The prompt must hold some text"),
        (("generate", "@/no/such/file"), 2, "must be readable"),
        (("generate", "hi", "--temperature", "-1"), 2, "temperature must be >= 0, got -1.0"),
        (("generate", "hi", "--temperature", "nan"), 2, "must be a finite number"),
        (("generate", "hi", "--top-p", "0"), 2, "top_p must be in (0, 1], got 0.0"),
        (("generate", "hi", "--top-p", "1.5"), 2, "top_p must be in (0, 1], got 1.5"),
        (("generate", "hi", "--min-p", "1"), 2, "min_p must be in [0, 1), got 1.0"),
        (("generate", "hi", "--top-k", "-1"), 2, "top_k must be >= 0"),
        (("generate", "hi", "--seed", "-1"), 2, "seed must be in"),
        (("generate", "hi", "--max-tokens", "0"), 2, "max-tokens"),
        (("generate", "hi", "--max-draft", "-1"), 2, 'must be a number >= 0, "full" or "auto"'),
        (("generate", "hi", "--max-draft", "9" * 5000), 2, '"full" or "auto"'),
        (("generate", "hi", "--confidence-threshold", "nan"), 2, "must be a finite number"),
        (("generate", "hi", "--stop", ""), 2, "--stop must have at least one character"),
        (("generate", "\udcff"), 2, "must be UTF-8"),
        (("generate", "hi", "--system", "\udcff"), 2, "must be UTF-8"),
        (("generate", "hi", "--stop", "a\udcff"), 2, "must be UTF-8"),
        (("generate", "hi", "--mode", "lookup", "--drafter", "x"), 2, "--drafter needs a mode"),
        (("generate", "hi", "--mode", "baseline", "--lookup-drafts"), 2, "--lookup-drafts needs"),
        (("eval", "--mode", "lookup", "--confidence-threshold", "0.5"), 2, "needs a mode"),
        (("benchmark", "--mode", "lookup", "--lookup-drafts"), 2, "needs a mode"),
        (("serve", "--mode", "lookup", "--drafter", "x"), 2, "needs a mode"),
        (("calibrate", "--mode", "lookup", "--drafter", "x"), 2, "needs a mode"),
        (("serve", "--prefix-cache-gb", "nan"), 2, "must be a finite number"),
        (("serve", "--kv-gb", "inf"), 2, "must be a finite number"),
        (("generate", "hi", "--mode", "turbo"), 2, "'turbo' is not one of"),
        (("generate", "hi", "--model", "/no/such/folder"), 1, 'No folder "/no/such/folder"'),
        (("generate", "hi", "--model", "gguf:/no/file.gguf"), 1, 'No file "/no/file.gguf"'),
        (("generate", "hi", "--model", "gguf:owner/none/x.gguf"), 1, "[hub]"),
        (("generate", "hi", "--model", "owner/none-such"), 1, "could not be fetched from the hub"),
        (("generate", "hi", "--model", "a b/c"), 1, "[model]"),
        (("frobnicate",), 2, "No such command"),
    ],
)  # fmt: skip
def test_bad_input_ends_in_a_short_message(spec, arguments, code, message):
    got, out, err = spec(*arguments)
    assert got == code and message in err and out == ""
    said = [line for line in err.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert 1 <= len(said) <= 3, err


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (None, "must be open"),
        (io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"), "must be readable text"),
        (io.StringIO(""), "must hold some text"),
    ],
)
def test_a_stdin_without_a_prompt_is_refused(spec, monkeypatch, stdin, message):
    monkeypatch.setattr(sys, "stdin", stdin)
    code, out, err = spec("generate", "-")
    assert (code, out) == (2, "") and message in err


def test_a_prompt_longer_than_the_context_is_refused(spec, tiny_folder):
    code, out, err = spec("generate", "word " * 400, "--model", tiny_folder)
    assert code == 1 and out == ""
    assert "must be shorter than the model's context of 256 tokens, got" in err


def test_the_answer_ends_where_the_context_ends(spec, tiny_folder):
    code, out, err = spec(
        "generate", " the" * 200, "--model", tiny_folder, "--max-tokens", 4000, "--json"
    )
    assert code == 0, err
    result = json.loads(out)
    assert result["prompt_tokens"] + len(result["token_ids"]) == 256
    assert result["finish_reason"] == "length"


def test_folders_that_are_no_checkpoint_are_refused_by_reason(spec, tiny_folder, tmp_path):
    def folder(name, config, weights=True):
        path = tmp_path / name
        path.mkdir()
        if config is not None:
            (path / "config.json").write_text(config)
        if weights:
            (path / "model.safetensors").write_bytes(b"")
        return path

    config = (tiny_folder / "config.json").read_text()
    cases = [
        (folder("empty", None), "must hold a config.json"),
        (folder("notjson", "{"), "must be JSON"),
        (folder("notype", "{}"), 'names a "model_type", got none. Give the folder'),
        (folder("list", "[]"), 'names a "model_type", got []. Give the folder'),
        (folder("unknown", '{"model_type": "mystery"}'), 'No target family "mystery"'),
        (folder("noweights", config, weights=False), "must hold model*.safetensors"),
        (folder("badweights", config), "look like an empty or zeroed file"),
        (folder("code", config[:-1] + ', "model_file": "evil.py"}'), '"model_file"'),
        (folder("auto", config[:-1] + ', "auto_map": {}}'), "--trust-remote-code"),
    ]
    for path, message in cases:
        code, out, err = spec("generate", "hi", "--model", path)
        assert (code, out) == (1, "") and message in err, (path.name, err)
        assert len(err.strip().splitlines()) <= 3


def test_a_bug_of_ours_is_one_line_and_a_traceback_on_request(spec, monkeypatch, capsys):
    from spec_cli import main, opening

    def broken(*args, **kwargs):
        raise RuntimeError("boom")

    monkeypatch.setattr(opening, "open_target", broken)
    code, out, err = spec("generate", "hi")
    assert code == 1 and "[bug] RuntimeError: boom" in err and "SPEC_DEBUG=1" in err
    monkeypatch.setenv("SPEC_DEBUG", "1")
    assert main.run(["generate", "hi"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("cap", [3, "full", "auto"])
def test_a_cap_without_a_drafter_is_remarked_on(spec, tiny_folder, cap):
    arguments = ("generate", "Hi", "--model", tiny_folder, "--mode", "baseline", "--max-tokens", 2)
    code, out, err = spec(*arguments, "--json", "--max-draft", cap)
    assert code == 0 and json.loads(out)["max_draft"] == 0
    assert err == "[draft] --max-draft changes nothing for baseline. Leave it out.\n"
    assert spec(*arguments, "--json", "--max-draft", 0)[2] == ""
