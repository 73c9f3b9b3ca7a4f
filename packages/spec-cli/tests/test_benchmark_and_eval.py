import json
import shutil

import pytest

from spec_cli import measure
from spec_cli.measure import Run, Tally
from spec_cli.prompts import BUNDLED, read_prompts
from spec_core import Sampling, SpecError, StatsMeter


@pytest.fixture
def prompt_file(tmp_path):
    rows = [
        {"id": "a", "task": "one", "prompt": "Name three rivers."},
        {"id": "b", "task": "two", "messages": [{"role": "user", "content": "Hello."}]},
        {"id": "c", "task": "two", "prompt_ids": [5, 6, 7, 5, 6]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_benchmark_races_lookup_against_baseline(spec, tiny_folder, prompt_file):
    code, out, err = spec(
        "benchmark", "--model", tiny_folder, "--mode", "lookup", "--prompts", prompt_file,
        "--max-tokens", 24, "--trials", 2, "--max-draft", "full", "--json",
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    assert set(report) == {"machine", "model", "drafter", "settings", "rows"}
    assert [(r["prompts"], r["mode"]) for r in report["rows"]] == [
        ("one", "baseline"), ("one", "lookup"), ("two", "baseline"), ("two", "lookup"),
    ]  # fmt: skip
    for row in report["rows"]:
        assert row["identical"] is True and row["trials"] == 2 and row["tokens_per_second"] > 0
        assert row["speedup"] == 1.0 or row["mode"] == "lookup"
        assert row["prefill_seconds"] > 0
    assert report["rows"][1]["acceptance_length"] > 1  # otherwise nothing was shown


def test_benchmark_draws_its_race(spec, tiny_folder, prompt_file, tmp_path):
    plot = tmp_path / "race.svg"
    arguments = (
        "benchmark", "--model", tiny_folder, "--mode", "lookup", "--prompts", prompt_file,
        "--max-tokens", 8, "--trials", 1, "--max-draft", "full", "--json", "--plot",
    )  # fmt: skip
    code, out, err = spec(*arguments, plot)
    assert code == 0 and f"plot: {plot}" in err
    assert json.loads(out)["rows"]
    drawn = plot.read_text()
    assert all(word in drawn for word in ("one", "two", "lookup", "baseline"))
    code, out, err = spec(*arguments, tmp_path / "race.gif")
    assert (code, out) == (2, "") and "must end in .png or .svg" in err


def test_a_race_says_so_when_ids_differ(monkeypatch):
    answers = {"baseline": [(1, 2)] * 3, "same": [(1, 2)] * 3, "other": [(1, 2), (1, 2), (1, 3)]}

    def run_once(pair, ids, **settings):
        return Run(answers[pair].pop(0), StatsMeter().result(), ())

    monkeypatch.setattr(measure, "run_once", run_once)
    monkeypatch.setattr(measure, "_speed", lambda trial: 1.0)
    lanes = [measure.Lane(mode, mode, None) for mode in answers]
    rows = measure.race(
        lanes,
        {"all": [[5]]},
        trials=2,
        max_tokens=2,
        sampling=Sampling(),
        on_step=lambda done, total: None,
    )
    assert {row["mode"]: row["identical"] for row in rows} == {
        "baseline": True, "same": True, "other": False,
    }  # fmt: skip


def test_a_race_counts_the_rounds_of_every_trial(monkeypatch):
    """An adaptive cap may park in one trial and draft in the next."""
    rounds = {"baseline": [[(0, 0, False)]] * 3, "own": [[], [(0, 0, False)] * 4, [(3, 3, False)]]}

    def run_once(pair, ids, **settings):
        return Run((1,), StatsMeter().result(), tuple(rounds[pair].pop(0)))

    monkeypatch.setattr(measure, "run_once", run_once)
    monkeypatch.setattr(measure, "_speed", lambda trial: 1.0)
    rows = measure.race(
        [measure.Lane(mode, mode, None) for mode in rounds],
        {"all": [[5]]},
        trials=2,
        max_tokens=2,
        sampling=Sampling(),
        on_step=lambda done, total: None,
    )
    assert rows[1]["acceptance_length"] == (4 * 1 + 4) / 5


def test_benchmark_prints_a_table(spec, tiny_folder, prompt_file):
    code, out, _ = spec(
        "benchmark", "--model", tiny_folder, "--mode", "lookup", "--prompts", prompt_file,
        "--set", "two", "--limit", 1, "--max-tokens", 4, "--trials", 1,
    )  # fmt: skip
    assert code == 0 and "speed-up" in out and "lookup" in out and "one" not in out


def test_a_model_that_ends_at_once_is_raced_without_a_speed(spec, tiny_folder, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "1, 2, 3"}')
    shutil.copytree(tiny_folder, tmp_path / "ends")
    settings = ("--raw", "--model", tmp_path / "ends", "--mode")
    code, out, err = spec("generate", "1, 2, 3", *settings, "baseline", "--max-tokens", 1, "--json")
    assert code == 0, err
    config = json.loads((tmp_path / "ends" / "config.json").read_text())
    config["eos_token_id"] = json.loads(out)["token_ids"]
    (tmp_path / "ends" / "config.json").write_text(json.dumps(config))
    race = ("--prompts", prompts, "--trials", 2, "--max-draft", 3)
    code, out, err = spec("benchmark", *settings, "lookup", *race, "--json")
    assert code == 0, err
    for row in json.loads(out)["rows"]:
        assert row["speedup"] is None and row["tokens_per_second"] == 0 and row["identical"]
    code, out, err = spec("benchmark", *settings, "lookup", *race)
    assert code == 0 and "lookup" in out, err


def test_eval_reports_every_task(spec, tiny_folder, prompt_file):
    code, out, err = spec(
        "eval",
        prompt_file,
        "--model",
        tiny_folder,
        "--mode",
        "lookup",
        "--max-tokens",
        32,
        "--json",
    )
    assert code == 0, err
    report = json.loads(out)
    assert set(report["tasks"]) == {"one", "two"} and report["tasks"]["two"]["prompts"] == 2
    lengths = [t["acceptance_length"] for t in report["tasks"].values()]
    assert report["mean_acceptance_length"] == pytest.approx(sum(lengths) / 2)
    code, out, _ = spec("eval", prompt_file, "--model", tiny_folder, "--max-tokens", 4)
    assert code == 0 and "tokens a round" in out


def test_a_tally_leaves_out_a_round_cut_short():
    tally = Tally()
    stats = StatsMeter().result()
    tally.add(Run((1, 2, 3, 4, 5), stats, ((4, 4, False), (4, 1, False), (2, 2, True))))
    figures = tally.figures()
    assert figures["rounds"] == 2 and figures["acceptance_length"] == 3.5
    assert figures["accepted_by_position"] == [1.0, 0.5, 0.5, 0.5]
    assert figures["acceptance_rate"] == 5 / 8


def test_the_bundled_sets_hold_six_prompts_each():
    by_task = {}
    for prompt in read_prompts(BUNDLED):
        by_task.setdefault(prompt.task, []).append(prompt.id)
    assert {task: len(ids) for task, ids in by_task.items()} == dict.fromkeys(
        ("chat", "code", "math", "copy"), 6
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must hold at least one prompt"),
        ('{"prompt": "a"}\n{"prompt":', 'line 2 must be a JSON object: Expecting value at column'),
        ("[1]", "line 1 must be a JSON object, got [1]."),
        ('{"id": "x"}', 'must have "prompt" (text)'),
        ('{"prompt": " "}', 'must have "prompt" (text)'),
        ('{"messages": [{"role": "user"}]}', 'must have "prompt" (text)'),
        ('{"prompt_ids": [1, true]}', 'must have "prompt" (text)'),
    ],
)  # fmt: skip
def test_prompt_files_are_checked_line_by_line(tmp_path, content, message):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(SpecError) as error:
        read_prompts(path)
    assert message in str(error.value)


@pytest.mark.parametrize("command", ["eval", "benchmark"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_ids": [1, 99999]}', "line 2 must have ids in 0..2047, got 99999."),
        (
            f'{{"prompt_ids": {[1] * 256}}}',
            "line 2 must be shorter than the model's context of 256 tokens, got 256.",
        ),
        (
            '{"messages": [{"role": "user", "content": 5}]}',
            "line 2 must be messages that the model's chat template takes",
        ),
    ],
)
def test_a_line_that_the_model_cannot_take_is_named_before_any_prompt_runs(
    spec, tiny_folder, tmp_path, monkeypatch, command, line, message
):
    monkeypatch.setattr("spec_cli.measure.run_once", None)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    given = ("--prompts", path) if command == "benchmark" else (path,)
    code, out, err = spec(command, *given, "--model", tiny_folder, "--max-draft", "0")
    assert (code, out) == (1, "") and message in err


def test_bad_arguments_end_in_a_short_message(spec, tiny_folder, prompt_file, tmp_path):
    common = ("--model", tiny_folder, "--prompts", prompt_file)
    assert spec("benchmark", *common, "--set", "three")[0] == 2
    assert spec("benchmark", *common, "--trials", "0")[0] == 2
    code, _, err = spec("eval", tmp_path / "none.jsonl", "--model", tiny_folder)
    assert code == 1 and "must be a readable text file" in err
