"""`spec generate`: one answer, streamed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from spec_cli import caps, machine, render
from spec_cli.commands.options import (
    MODES,
    drafter_option,
    drafter_options,
    model_options,
    names_of,
    open_target,
    refuse_unused,
    sampling_of,
    sampling_options,
    texts_of,
    wish_of,
)


def read_prompt(value: str) -> str:
    """The prompt's text: as typed, `-` for stdin, `@file` for a file's content."""
    if value == "-":
        return _read_stdin()
    if value.startswith("@"):
        try:
            return Path(value[1:]).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            message = f'The prompt file "{value[1:]}" must be readable: {why}.'
            raise click.UsageError(message) from None
    return value


def _read_stdin() -> str:
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise click.UsageError('Standard input must be open for PROMPT "-", and is closed.')
    try:
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"Standard input must be readable text: {error}") from None


@click.command(short_help="Answer a prompt.")
@click.argument("prompt", required=False)
@click.option("--prompt", "prompt_option", help="The same as PROMPT.")
@model_options
@click.option("--mode", type=click.Choice(MODES), default="auto", show_default=True)
@drafter_option
@drafter_options
@sampling_options
@click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--stop", multiple=True, help="Ends the text just before this string; repeatable.")
@click.option("--system", help="System message.")
@click.option("--thinking/--no-thinking", default=None, help="For templates that know it.")
@click.option("--exact", is_flag=True, help="Refuse unless every op is row-invariant.")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it stands, without a chat template.")
@click.option("--stats/--no-stats", default=True, show_default=True, help="A line on stderr.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the text.")
def generate(prompt: str | None, prompt_option: str | None, **options: Any) -> None:
    """Answer PROMPT ("-" reads stdin, "@FILE" a file)."""
    if (prompt is None) == (prompt_option is None):
        raise click.UsageError("Give one PROMPT.")
    text = read_prompt(prompt if prompt is not None else prompt_option or "")
    if not text.strip():
        raise click.UsageError("The prompt must hold some text, got none.")
    texts_of(options, text)
    refuse_unused(options, options["mode"])
    sampling = sampling_of(options)
    opened = open_target(options, split=True)
    pair = opened.pair(wish_of(options, options["mode"], options["drafter"]))
    ids = _encode(opened.tokenizer, text, options)
    _answer(opened.name, pair, ids, sampling, caps.caps_for(opened, pair, options), options)


def _encode(tokenizer: Any, text: str, options: dict[str, Any]) -> list[int]:
    if options["raw"]:
        if options["system"] is not None:
            raise click.UsageError("--system needs a chat template; leave --raw out.")
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if options["system"] is not None:
        messages.insert(0, {"role": "system", "content": options["system"]})
    extra = {} if options["thinking"] is None else {"enable_thinking": options["thinking"]}
    return tokenizer.encode_chat(messages, **extra)


def _shown(pair: Any, raw: bool) -> tuple[Any, Callable[[Any], str]]:
    """The pair to generate with, and what a user sees of a round."""
    if raw or not pair.tokenizer.harmony:
        return pair, lambda round_: round_.text
    from spec_cli.channels import Channels, marked

    return marked(pair), Channels().push


def _answer(
    model: str,
    pair: Any,
    ids: list[int],
    sampling: Any,
    chosen: caps.Caps,
    options: dict[str, Any],
) -> None:
    import mlx.core as mx

    from spec_core import StatsMeter
    from spec_core import generate as rounds

    as_json, cap = options["as_json"], chosen.make()
    pair, shown = _shown(pair, options["raw"])
    mode, drafter = names_of(pair.drafter)
    mx.reset_peak_memory()
    meter, tokens, pieces = StatsMeter(), [], []
    for round_ in rounds(
        pair,
        ids,
        max_tokens=options["max_tokens"],
        sampling=sampling,
        cap=cap,
        stop_strings=options["stop"],
    ):
        meter.add(round_)
        tokens += round_.tokens
        pieces.append(shown(round_))
        if not as_json:
            render.stream(pieces[-1])
    stats = meter.result()
    if not as_json:
        render.end_stream()
        if options["stats"]:
            line = render.stats_line(stats, mode, drafter)
            render.note(" · ".join([line, *caps.remarks(chosen, cap, pair.target)]))
        return
    render.one_json(
        {
            "text": "".join(pieces),
            "token_ids": tokens,
            "prompt_tokens": len(ids),
            "finish_reason": stats.finish_reason,
            "mode": mode,
            "drafter": drafter,
            "max_draft": chosen.shown,
            "acceptance_length": stats.acceptance_length,
            "acceptance_rate": stats.acceptance_rate,
            "rounds": stats.n_rounds,
            "accepted_by_position": list(stats.accepted_by_position),
            "draft_tokens": stats.n_drafted,
            "tokens_per_second": stats.tokens_per_second,
            "prefill_seconds": stats.prefill_s,
            "decode_seconds": stats.decode_s,
            "total_seconds": stats.prefill_s + stats.decode_s,
            "peak_memory_bytes": mx.get_peak_memory(),
            "backend": machine.backend(),
            "exact": options["exact"],
            "near_ties": stats.near_ties,
            "model": model,
        }
    )
