"""`spec models`: known pairs, and what is on this disk."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from spec_cli import env, render

_LM_STUDIO = (Path("~/.lmstudio/models"), Path("~/.cache/lm-studio/models"))


@click.command(short_help="List known pairs, and models on disk.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def models(as_json: bool) -> None:
    """List the known pairs of target and drafter, and the checkpoints on this disk."""
    from spec_drafters.pairs import known_pairs, other_heads

    found, pairs = on_disk(), [asdict(pair) for pair in known_pairs()]
    others = [asdict(head) for head in other_heads()]
    if as_json:
        render.one_json({"pairs": pairs, "other_drafters": others, "on_disk": found})
        return
    known = [[p["target"], p["mode"], p[p["mode"]] or "", str(p["cap"])] for p in pairs]
    render.table("known pairs", ["target", "mode", "drafter", "best cap"], known)
    more = [[o["target"], o["mode"], o["head"]] for o in others]
    render.table("other drafters, for --drafter", ["target", "mode", "drafter"], more)
    rows = [[m["name"], m["model_type"], "yes" if m["runs"] else "no", m["where"]] for m in found]
    render.table("on disk", ["model", "type", "runs", "where"], rows)


def on_disk() -> list[dict[str, Any]]:
    """Checkpoints in the embedded default, the conversion cache and the hub cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    import spec_demo

    found: list[dict[str, Any]] = []
    gguf = spec_demo.target_gguf()
    if gguf is not None:
        found.append(_entry(spec_demo.NAME, "llama", "embedded", str(gguf)))
    for config in sorted((env.cache_dir() / "converted").glob("*/config.json")):
        found.append(_entry(config.parent.name, _model_type(config), "converted", config.parent))
    for config in sorted(Path(HF_HUB_CACHE).glob("models--*/snapshots/*/config.json")):
        name = config.parents[2].name.removeprefix("models--").replace("--", "/", 1)
        found.append(_entry(name, _model_type(config), "hub cache", config.parent))
    for folder in _LM_STUDIO:
        for config in sorted(folder.expanduser().glob("*/*/config.json")):
            name = "/".join(config.parent.parts[-2:])
            found.append(_entry(name, _model_type(config), "LM Studio", config.parent))
    return found


def _entry(name: str, model_type: str, where: str, path: Path | str) -> dict[str, Any]:
    from spec_core import LoadError
    from spec_targets.load import family_for

    try:
        family_for(model_type)
        runs = True
    except LoadError:
        runs = False
    return {"name": name, "model_type": model_type, "runs": runs, "where": where, "path": str(path)}


def _model_type(config: Path) -> str:
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        return str(content["model_type"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "unknown"
