"""`spec chat`: a conversation in the terminal, or with a script on stdin."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from spec_cli import caps, render
from spec_cli.commands.options import (
    MODES,
    drafter_option,
    drafter_options,
    is_unicode,
    model_options,
    names_of,
    open_target,
    refuse_unused,
    sampling_of,
    sampling_options,
    texts_of,
    wish_of,
)

COMMANDS = ("/exit", "/clear", "/stats")


@click.command(short_help="Talk to the model, a line at a time.")
@model_options
@click.option("--mode", type=click.Choice(MODES), default="auto", show_default=True)
@drafter_option
@drafter_options
@sampling_options
@click.option("--max-tokens", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--stop", multiple=True, help="Ends an answer just before this string; repeatable.")
@click.option("--system", help="System message.")
@click.option("--thinking/--no-thinking", default=None, help="For templates that know it.")
@click.option("--exact", is_flag=True, help="Refuse unless every op is row-invariant.")
@click.option("--stats/--no-stats", default=True, show_default=True, help="A line on stderr.")
def chat(**options: Any) -> None:
    """Talk to the model, a line at a time; /exit, /clear and /stats are commands.

    Ctrl-C stops an answer, a second one leaves; the end of the input leaves too.
    """
    texts_of(options)
    refuse_unused(options, options["mode"])
    sampling = sampling_of(options)
    opened = open_target(options)
    if not opened.tokenizer.has_chat_template:
        from spec_core import SpecError

        raise SpecError(
            f'[chat] The model must have a chat template, got "{opened.name}", a base model '
            "without one. Use an instruct model, or spec generate --raw to continue a text."
        )
    pair = opened.pair(wish_of(options, options["mode"], options["drafter"]))
    chosen = caps.caps_for(opened, pair, options)
    conversation = _conversation(pair, chosen.make(), sampling, options)
    mode, drafter = names_of(pair.drafter)
    if render.interactive():
        render.note(f"{opened.name} ({mode}). Commands: {', '.join(COMMANDS)}.")
    all_answered = _talk(conversation, chosen if options["stats"] else None, mode, drafter)
    if not all_answered and not render.interactive():
        raise click.exceptions.Exit(1)


def _conversation(pair: Any, cap: Any, sampling: Any, options: dict[str, Any]) -> Any:
    from spec_cli.conversation import Conversation

    thinking = options["thinking"]
    return Conversation(
        pair,
        cap,
        system=options["system"],
        template_args={} if thinking is None else {"enable_thinking": thinking},
        sampling=sampling,
        settings={"max_tokens": options["max_tokens"], "stop_strings": options["stop"]},
    )


def _talk(conversation: Any, told: caps.Caps | None, mode: str, drafter: str | None) -> bool:
    """Until /exit or the end of the input; False when a message was refused.

    Without `told`, the cap that is spoken of, there are no statistics.
    """
    from spec_cli.conversation import TurnError

    all_answered = True
    while True:
        try:
            line = render.ask("> ")
        except KeyboardInterrupt:
            if not render.interactive():
                raise
            render.note("\n/exit or the end of the input leaves.")
            continue
        except UnicodeDecodeError as error:
            raise click.UsageError(f"Standard input must be readable text: {error}") from None
        if line is None or line.strip() == "/exit":
            return all_answered
        if not line.strip() or _obeyed(conversation, line.strip(), mode, drafter):
            continue
        try:
            if not is_unicode(line):
                raise TurnError("[input] A line must be UTF-8, got other bytes. Encode it so.")
            _answer(conversation, line)
        except TurnError as error:
            all_answered = False
            render.complain(f"{error}\n/clear starts afresh.")
            continue
        if told is not None:
            _note_turn(conversation, told, mode, drafter)


def _answer(conversation: Any, line: str) -> None:
    with _interruptible(conversation):
        for piece in conversation.answer(line):
            render.stream(piece)
    render.end_stream()
    if conversation.stopping:
        render.note("Stopped.")


@contextmanager
def _interruptible(conversation: Any) -> Iterator[None]:
    """The first Ctrl-C ends the answer after the round in progress; a second one is as usual."""

    def stop(number: int, frame: Any) -> None:
        if conversation.stopping:
            raise KeyboardInterrupt
        conversation.stopping = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _obeyed(conversation: Any, line: str, mode: str, drafter: str | None) -> bool:
    """Do what a command says; False for a message."""
    if line == "/clear":
        conversation.clear()
        render.note("A new conversation.")
    elif line == "/stats":
        _note_all(conversation, mode, drafter)
    elif re.fullmatch(r"/\w*", line) or line.split()[0] in COMMANDS:  # a command takes no words
        render.note(f'No command "{line}". There are: {", ".join(COMMANDS)}.')
    else:
        return False
    return True


def _note_turn(conversation: Any, chosen: caps.Caps, mode: str, drafter: str | None) -> None:
    turn = conversation.turns[-1]
    reused = f"{turn.reused_tokens} of {turn.prompt_tokens} prompt tokens reused"
    line = render.stats_line(turn.stats, mode, drafter)
    remarks = caps.remarks(chosen, conversation.cap, conversation.pair.target)
    render.note(" · ".join([line, reused, *remarks]))


def _note_all(conversation: Any, mode: str, drafter: str | None) -> None:
    """Sums over the turns so far."""
    turns = conversation.turns
    every = [turn.stats for turn in turns]
    seconds = sum(stats.decode_s for stats in every)
    decoded = sum(max(stats.n_tokens - 1, 0) for stats in every)
    parts = [
        f"{len(turns)} answers",
        f"{sum(stats.n_tokens for stats in every)} tokens",
        f"{decoded / seconds if seconds else 0.0:.1f} tok/s",
        mode,
    ]
    if drafter is not None:
        drafted = sum(stats.n_drafted for stats in every)
        accepted = sum(stats.n_accepted for stats in every)
        parts.append(f"{accepted} of {drafted} drafts accepted")
    reused, prompt = (sum(getattr(t, f"{n}_tokens") for t in turns) for n in ("reused", "prompt"))
    parts.append(f"{reused} of {prompt} prompt tokens reused")
    if near_ties := sum(stats.near_ties for stats in every):
        parts.append(f"{near_ties} near ties")
    render.note(" · ".join(parts))
