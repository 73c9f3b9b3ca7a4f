"""`spec serve`: the model over HTTP."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from spec_cli import caps, env, render
from spec_cli.commands.options import (
    MODES,
    Finite,
    drafter_option,
    drafter_options,
    model_options,
    names_of,
    open_target,
    refuse_unused,
    wish_of,
)

_GIB = 2**30
_MOST_FILES = 10_240  # macOS takes no more


@click.command()
@model_options
@click.option("--mode", type=click.Choice(MODES), default="auto", show_default=True)
@drafter_option
@drafter_options
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option("--api-key", help="Asked of every request but /health.")
@click.option("--allowed-host", multiple=True, help="Host header to answer to; repeatable.")
@click.option("--cors-origin", multiple=True, help="Origin whose pages may call; repeatable.")
@click.option("--max-batch", type=click.IntRange(1), default=8, show_default=True)
@click.option("--max-queue", type=click.IntRange(0), default=64, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), help="Where a request names no limit.")
@click.option("--prefix-cache-gb", type=Finite(0), default=2.0, show_default=True)
@click.option("--prefix-cache-disk", is_flag=True, help="Keep prompt states over restarts.")
@click.option("--kv-gb", type=Finite(0, min_open=True), help="Memory of running requests.")
@click.option("--exact", is_flag=True, help="Refuse unless every op is row-invariant.")
def serve(**options: Any) -> None:
    """Answer OpenAI's and Anthropic's HTTP dialects."""
    from spec_server import Server, Settings

    refuse_unused(options, options["mode"])
    kv_gb = options["kv_gb"]
    try:
        settings = Settings(
            host=options["host"],
            port=options["port"],
            # An empty key is that of an unset variable: refused, not taken for none.
            api_key=env.api_key() if options["api_key"] is None else options["api_key"],
            allowed_hosts=options["allowed_host"],
            cors_origins=options["cors_origin"],
            max_batch=options["max_batch"],
            max_queue=options["max_queue"],
            default_max_tokens=options["max_tokens"],
            prefix_bytes=int(options["prefix_cache_gb"] * _GIB),
            prefix_dir=_prefix_dir() if options["prefix_cache_disk"] else None,
            kv_bytes=int(kv_gb * _GIB) if kv_gb is not None else None,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _raise_file_limit()
    server = Server(lambda: _load(options), settings)
    server.load()
    served = server.engine.served
    assert served is not None
    refusal = server.engine.batch_refusal
    if refusal is not None and settings.max_batch > 1:
        render.note(f"Requests take turns, because {refusal}.")
    if server.is_public and settings.api_key is None:
        render.note("Anyone who reaches this address can use it. --api-key asks for a key.")
    render.note(f"{served.model} ({served.mode}) on {server.url}")
    server.run()


def _raise_file_limit() -> None:
    """A connection is an open file, and macOS gives a process 256 unless it asks."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # then it has to do with what it has
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _prefix_dir() -> Path:
    return env.cache_dir() / "prefixes"


def _load(options: dict[str, Any]) -> Any:
    """Load what is served; runs on the engine's thread."""
    from spec_core import Cap, FixedCap
    from spec_server import Served

    opened = open_target(options)
    pair = opened.pair(wish_of(options, options["mode"], options["drafter"]))
    chosen = caps.caps_for(opened, pair, options)
    if pair.drafter is not None:
        render.note(f"Drafts: {chosen}.")
    shared = chosen.make()  # one for all requests, since it learns from text to text
    mode, drafter = names_of(pair.drafter)

    settings = f"{drafter}|{options['drafter']}|kv {options['kv_bits']}"
    settings += f"|exact {options['exact']}|kernels {options['kernels']}"  # other ops, other bits

    def make_cap(wish: int | None) -> Cap:
        return shared if wish is None else FixedCap(min(wish, chosen.most))

    costs = caps.row_costs(opened, pair, options) if pair.drafter is not None else None
    return Served(pair, opened.name, mode, make_cap, settings, costs)
