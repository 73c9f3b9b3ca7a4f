import io
import os
import select
import signal
import subprocess
import sys

import pytest

from spec_cli import render
from spec_cli.conversation import Conversation, TurnError
from spec_core import FixedCap, Pair, Sampling, generate
from spec_core.toys import ToyDrafter
from spec_drafters import LookupDrafter
from spec_targets import MlxTarget
from spec_targets.families import FAMILIES
from spec_targets.tiny import VOCAB, tiny_model


class Letters:
    """A tokenizer of single letters whose chat template forgets all answers but the last words."""

    stop_ids: frozenset[int] = frozenset()
    has_chat_template = True
    harmony = False

    def __init__(self, kept: int = 10_000):
        self.kept = kept

    def encode_chat(self, messages, **_):
        text = ""
        for message in messages:
            content = message["content"]
            text += "u" + content if message["role"] == "user" else "a" + content[-self.kept :]
        return self.encode(text + "a")

    def encode(self, text):
        return [ord(c) % VOCAB for c in text]

    def decode(self, ids):
        # Letters whose code gives the id again, so that an answer encodes to what was emitted.
        return "".join(chr(i + 10 * VOCAB) for i in ids)


def conversation(model_type="llama", drafter=None, kept=10_000, **settings) -> Conversation:
    target = MlxTarget(tiny_model(model_type), FAMILIES[model_type], model_type, 512, n_heads=4)
    pair = Pair(target, drafter or LookupDrafter(), Letters(kept))
    settings = {"max_tokens": 20, **settings}
    return Conversation(
        pair, FixedCap(4), system=None, template_args={}, sampling=Sampling(), settings=settings
    )


def afresh(chat: Conversation, n_messages: int) -> str:
    """The answer to the first messages, without anything kept."""
    prompt = chat.pair.tokenizer.encode_chat(chat.messages[:n_messages])
    pair = Pair(chat.pair.target, None, chat.pair.tokenizer)
    return "".join(round_.text for round_ in generate(pair, prompt, max_tokens=20))


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_5", "lfm2"])
@pytest.mark.parametrize("kept", [10_000, 3])
def test_every_turn_answers_as_if_nothing_were_kept_and_reuses_what_it_can(model_type, kept):
    chat = conversation(model_type, kept=kept)
    for text in ("tell me a tale", "and another", "more"):
        assert len("".join(chat.answer(text))) == 20
    for n in (1, 3, 5):
        assert chat.messages[n]["content"] == afresh(chat, n)
    first, *later = chat.turns
    assert first.reused_tokens == 0
    for turn, before in zip(later, chat.turns, strict=False):
        # All but the newest token of the answer; what a template cut goes on from the prompt.
        whole = before.prompt_tokens + 19
        cut = before.prompt_tokens + 3
        least = before.prompt_tokens if model_type != "lfm2" or kept > 3 else 0
        assert least <= turn.reused_tokens <= (whole if kept > 3 else cut)
        if kept > 3:
            assert turn.reused_tokens == whole


def test_a_drafter_with_a_context_follows_the_kept_cache():
    drafter = ToyDrafter(VOCAB, taps=(0, 2))
    chat = conversation(drafter=drafter)
    for text in ("tell me a tale", "and another"):
        list(chat.answer(text))
    assert chat.turns[1].reused_tokens == chat.turns[0].prompt_tokens + 19
    assert chat.messages[3]["content"] == afresh(chat, 3)
    tokenizer = chat.pair.tokenizer
    ids = tokenizer.encode_chat(chat.messages[:3]) + tokenizer.encode(chat.messages[3]["content"])
    assert drafter.observed == ids[:-1]  # the newest token is the anchor


def test_a_stopped_answer_stays_as_far_as_it_came_and_the_next_turn_builds_on_it():
    chat = conversation()
    said = []
    for piece in chat.answer("tell me a tale"):
        said.append(piece)
        if len("".join(said)) > 4:
            chat.stopping = True
    text = "".join(said)
    assert 4 < len(text) < 20 and chat.messages[1]["content"] == text
    list(chat.answer("go on"))
    assert chat.messages[3]["content"] == afresh(chat, 3)
    assert chat.turns[1].reused_tokens >= chat.turns[0].prompt_tokens


def test_an_answer_stopped_before_its_first_token_was_never_asked():
    chat = conversation(prefill_chunk=4)
    pieces = chat.answer("tell me a tale")
    forward = chat.pair.target.prefill

    def stop_in_the_first_chunk(*arguments, **named):
        chat.stopping = True
        return forward(*arguments, **named)

    chat.pair.target.prefill = stop_in_the_first_chunk
    assert list(pieces) == [] and chat.messages == []
    chat.pair.target.prefill = forward
    assert len("".join(chat.answer("tell me a tale"))) == 20
    assert chat.messages[1]["content"] == afresh(chat, 1)


def test_a_refused_turn_leaves_the_conversation_as_it_was():
    chat = conversation()
    list(chat.answer("hello"))
    before = chat.messages
    with pytest.raises(TurnError, match="must be shorter than the model's context of 512"):
        list(chat.answer("x" * 600))
    assert chat.messages == before
    list(chat.answer("again"))
    assert chat.messages[3]["content"] == afresh(chat, 3)


def test_seeds_repeat_a_conversation_and_differ_from_turn_to_turn():
    def sampled():
        chat = conversation()
        chat._sampling = Sampling(temperature=1.0, seed=5)
        for _ in range(2):
            list(chat.answer("hello"))
        chat.clear()
        list(chat.answer("hello"))
        return [m["content"] for m in chat.messages], chat

    (first, chat), (again, _) = sampled(), sampled()
    assert first == again and len(chat.turns) == 3 and len(chat.messages) == 2


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture(name="chat")
def _chat(spec, tiny_folder, monkeypatch):
    """Run `spec chat` with these lines on stdin."""

    def call(text, *arguments):
        stdin = text if not isinstance(text, str) else io.StringIO(text)
        monkeypatch.setattr(sys, "stdin", stdin)
        common = ("--model", tiny_folder, "--max-draft", "full", "--max-tokens", 12)
        return spec("chat", *common, *arguments)

    return call


def test_lines_of_stdin_are_answered_in_turn_until_its_end(chat):
    code, out, err = chat("Hi\n\nName three rivers.")
    assert code == 0 and out.endswith("\n")
    first, second = err.splitlines()
    assert "12 tokens" in first and "· lookup ·" in first and "· 0 of " in first
    n_prompt, reused = (int(second.split(" prompt tokens")[0].split()[i]) for i in (-1, -3))
    assert 0 < reused < n_prompt
    assert chat("Hi\n\nName three rivers.\n", "--no-stats") == (0, out, "")


def test_the_first_answer_is_that_of_generate(chat, spec, tiny_folder):
    _, out, _ = chat("Name three rivers.\n", "--system", "Be brief.")
    common = ("--model", tiny_folder, "--max-tokens", 12, "--system", "Be brief.")
    assert spec("generate", "Name three rivers.", *common)[1] == out


def test_exit_leaves_and_commands_are_obeyed(chat):
    code, out, err = chat("Hi\n/stats\n/clear\nHi\n/stats\n/quit\n/exit\nHi\n", "--no-stats")
    assert code == 0
    assert out == 2 * out[: len(out) // 2]  # after /clear the same answer again
    before, cleared, after, unknown = err.splitlines()
    assert before.startswith("1 answers · 12 tokens") and after.startswith("2 answers · 24 tokens")
    assert "drafts accepted" in after and "prompt tokens reused" in after
    assert cleared == "A new conversation."
    assert unknown == 'No command "/quit". There are: /exit, /clear, /stats.'


@pytest.mark.parametrize("line", ["/", "/exit now", "/clear all"])
def test_a_command_with_more_words_is_not_sent_to_the_model(chat, line):
    code, out, err = chat(f"{line}\n")
    assert (code, out) == (0, "") and err.startswith(f'No command "{line}".')


@pytest.mark.parametrize("name", ["--model", "--drafter"])
def test_an_empty_name_is_a_usage_error(spec, name):
    code, out, err = spec("generate", "Hi", name, "")
    assert (code, out) == (2, "") and "must be a folder or an id, got an empty text" in err


def test_a_message_may_begin_with_a_slash(chat):
    assert len(chat("/etc/hosts is what?\n")[1]) > 1


@pytest.mark.parametrize(
    ("stdin", "code", "message"),
    [
        (None, 1, "[input] Standard input must be open"),
        (io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"), 2, "must be readable text"),
        ("word " * 400, 1, "must be shorter than the model's context of 256 tokens"),
        ("half \ud800 a pair", 1, "A line must be UTF-8, got other bytes"),
        ("", 0, ""),
    ],
)
def test_input_that_cannot_be_answered_ends_in_a_short_message(chat, stdin, code, message):
    got, out, err = chat(stdin)
    assert (got, out) == (code, "") and message in err
    assert len(err.splitlines()) <= 4


def test_a_refused_message_does_not_end_the_conversation(chat):
    code, out, err = chat("word " * 400 + "\nHi\n")
    assert code == 1 and len(out) > 1
    assert "/clear starts afresh." in err and "12 tokens" in err


def test_bad_options_are_usage_errors(chat):
    for arguments, message in (
        (("--stop", ""), "at least one character"),
        (("--system", "\udcff"), "must be UTF-8"),
        (("--temperature", "-1"), "temperature must be >= 0"),
        (("--mode", "lookup", "--drafter", "x"), "--drafter needs a mode"),
    ):
        code, out, err = chat("Hi\n", *arguments)
        assert (code, out) == (2, "") and message in err


def test_a_base_model_is_refused_with_what_would_work(chat, tiny_folder, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for path in tiny_folder.iterdir():
        if path.name != "chat_template.jinja":
            (base / path.name).write_bytes(path.read_bytes())
    config = base / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"chat_template"', '"no_template"'))
    code, out, err = chat("Hi\n", "--model", str(base))
    assert (code, out) == (1, "")
    assert err.startswith("[chat] The model must have a chat template, got ")
    assert "spec generate --raw" in err and len(err.splitlines()) == 1


def test_ctrl_c_stops_an_answer_and_a_second_one_leaves(chat, monkeypatch):
    write, pressed = render.stream, []

    def press(times):
        def stream(text):
            write(text)
            if text and len(pressed) < times:
                pressed.append(signal.raise_signal(signal.SIGINT))

        return stream

    whole = chat("Hi\n", "--no-stats")[1]
    monkeypatch.setattr(render, "stream", press(1))
    code, out, err = chat("Hi\nHi\n", "--no-stats")
    assert code == 0 and err == "Stopped.\n"
    first, second = out.split("\n", 1)
    assert whole.startswith(first) and len(first) < len(whole) - 1 and len(second) > 1
    pressed.clear()

    def twice(text):
        write(text)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(render, "stream", twice)
    code, out, err = chat("Hi\nHi\n")
    assert code == 130 and err.endswith("Stopped.\n")


@pytest.mark.slow
def test_at_a_terminal_it_asks_and_ctrl_d_leaves(tiny_folder, tmp_path):
    outer, inner = os.openpty()
    command = [sys.executable, "-c", "from spec_cli.entry import main; main()", "chat"]
    arguments = ["--model", tiny_folder, "--max-tokens", "8", "--max-draft", "2"]
    process = subprocess.Popen(
        [str(part) for part in (*command, *arguments)],
        stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
        env={**os.environ, "SPEC_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    os.close(inner)
    shown = bytearray()

    def until(words: bytes) -> None:
        while words not in shown:
            assert select.select([outer], [], [], 60)[0], bytes(shown)
            shown.extend(os.read(outer, 4096))
        del shown[: shown.index(words) + len(words)]

    try:
        until(b"Commands: /exit, /clear, /stats.")
        until(b"> ")
        os.write(outer, b"Hi\n")
        until(b"8 tokens")
        until(b"> ")
        process.send_signal(signal.SIGINT)
        until(b"/exit or the end of the input leaves.")
        until(b"> ")
        os.write(outer, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(outer)
