"""`spec generate`: one answer, streamed."""

import sys
from pathlib import Path
from typing import Any

import click

from spec_cli import opening, render

MODES = ("auto", "lookup", "baseline")


def read_prompt(value: str) -> str:
    """The prompt's text: as typed, `-` for stdin, `@file` for a file's content."""
    if value == "-":
        return sys.stdin.read()
    if value.startswith("@"):
        try:
            return Path(value[1:]).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f'The prompt file "{value[1:]}" must be readable: {error}'
            raise click.UsageError(message) from None
    return value


class MaxDraft(click.ParamType):
    """A number of drafts, or "full" for the drafter's whole block."""

    name = "N|full"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Check one value."""
        if value == "full" or isinstance(value, int):
            return value
        if not str(value).isdecimal():
            self.fail(f'"{value}" must be a number >= 0 or "full".', param, ctx)
        return int(value)


@click.command()
@click.argument("prompt", required=False)
@click.option("--prompt", "prompt_option", help="The same as PROMPT.")
@click.option("--model", help="Folder, Hugging Face id, or gguf:FILE.  [default: the embedded one]")
@click.option("--mode", type=click.Choice(MODES), default="auto", show_default=True)
@click.option("--max-draft", type=MaxDraft(), help="Most drafted tokens a round; 0 = plain.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 = greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0 = off.")
@click.option("--min-p", type=float, default=0.0, show_default=True)
@click.option("--seed", type=int, help="Repeats a sampled answer of the same mode.")
@click.option("--max-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--stop", multiple=True, help="Ends the text just before this string; repeatable.")
@click.option("--system", help="System message.")
@click.option("--thinking/--no-thinking", default=None, help="For templates that know it.")
@click.option("--exact", is_flag=True, help="Refuse unless every op is row-invariant.")
@click.option("--raw", is_flag=True, help="Continue PROMPT as it stands, without a chat template.")
@click.option("--trust-remote-code", is_flag=True, help="Let a checkpoint's own Python run.")
@click.option("--stats/--no-stats", default=True, show_default=True, help="A line on stderr.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the text.")
def generate(prompt: str | None, prompt_option: str | None, **options: Any) -> None:
    """Answer PROMPT ("-" reads stdin, "@FILE" a file)."""
    if (prompt is None) == (prompt_option is None):
        raise click.UsageError("Give one PROMPT.")
    text = read_prompt(prompt if prompt is not None else prompt_option or "")
    if not text.strip():
        raise click.UsageError("The prompt must hold some text, got none.")
    sampling = _sampling(options)
    opened = opening.open_pair(
        options["model"],
        mode=options["mode"],
        exact=options["exact"],
        trust_remote_code=options["trust_remote_code"],
    )
    ids = _encode(opened, text, options)
    _answer(opened, ids, sampling, options)


def _sampling(options: dict[str, Any]) -> Any:
    from spec_core import Sampling

    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    try:
        return Sampling(**{name: options[name] for name in names})
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _encode(opened: opening.Opened, text: str, options: dict[str, Any]) -> list[int]:
    tokenizer: Any = opened.pair.tokenizer
    if options["raw"]:
        if options["system"] is not None:
            raise click.UsageError("--system needs a chat template; leave --raw out.")
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    if options["system"] is not None:
        messages.insert(0, {"role": "system", "content": options["system"]})
    extra = {} if options["thinking"] is None else {"enable_thinking": options["thinking"]}
    return tokenizer.encode_chat(messages, **extra)


def _cap(opened: opening.Opened, max_draft: int | str | None) -> int:
    """The number of drafts that really applies; a larger wish is cut with a notice."""
    drafter = opened.pair.drafter
    if drafter is None:
        return 0
    if max_draft is None or isinstance(max_draft, str):
        return drafter.max_draft
    if max_draft > drafter.max_draft:
        render.note(
            f"[draft] {drafter.name} drafts at most {drafter.max_draft} tokens a round; "
            f"--max-draft {max_draft} is cut to that."
        )
    return min(max_draft, drafter.max_draft)


def _answer(opened: opening.Opened, ids: list[int], sampling: Any, options: dict[str, Any]) -> None:
    import mlx.core as mx

    from spec_core import FixedCap, StatsMeter
    from spec_core import generate as rounds

    as_json, cap = options["as_json"], _cap(opened, options["max_draft"])
    mx.reset_peak_memory()
    meter, tokens, pieces = StatsMeter(), [], []
    for round_ in rounds(
        opened.pair,
        ids,
        max_tokens=options["max_tokens"],
        sampling=sampling,
        cap=FixedCap(cap),
        stop_strings=options["stop"],
    ):
        meter.add(round_)
        tokens += round_.tokens
        pieces.append(round_.text)
        if not as_json:
            render.stream(round_.text)
    stats = meter.result()
    if not as_json:
        render.end_stream()
        if options["stats"]:
            render.note(render.stats_line(stats, opened.mode, opened.drafter))
        return
    render.one_json(
        {
            "text": "".join(pieces),
            "token_ids": tokens,
            "prompt_tokens": len(ids),
            "finish_reason": stats.finish_reason,
            "mode": opened.mode,
            "drafter": opened.drafter,
            "max_draft": cap,
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
            "backend": backend(),
            "exact": options["exact"],
            "near_ties": stats.near_ties,
            "model": opened.model,
        }
    )


def backend() -> str:
    """The MLX backend in use: "metal", "cuda" or "cpu"."""
    import mlx.core as mx

    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
