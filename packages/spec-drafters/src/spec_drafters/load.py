"""From a folder, a hub id or nothing to a drafter that fits the target: the loader of `load_pair`.

What a checkpoint is follows from what its files hold; the mode only confirms it. Without a
checkpoint the table of known pairs decides, and lookup where it knows none.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx

from spec_core import Drafter, LoadError, Sampling, SpecError, Target
from spec_core.errors import one_line
from spec_core.host import host_ints
from spec_drafters._checkpoint import Checkpoint, open_checkpoint
from spec_drafters._eagle_config import is_eagle3
from spec_drafters._files import carries_drafts, locate, own_drafts
from spec_drafters._packaging import block_family
from spec_drafters._speculators import algorithm, is_speculators
from spec_drafters._vocabulary import check_same_vocabulary
from spec_drafters.deepseek_v4 import DeepseekV4Drafter
from spec_drafters.dflash import DFlashDrafter
from spec_drafters.dflash2 import DFlash2Drafter
from spec_drafters.draft_model import DraftModelDrafter
from spec_drafters.dspark import DSparkDrafter
from spec_drafters.eagle3 import Eagle3Drafter
from spec_drafters.hybrid import HybridDrafter
from spec_drafters.lookup import LookupDrafter
from spec_drafters.pairs import KnownPair, find_other, find_pair

MODES = ("auto", "dspark", "dflash", "eagle3", "draft-model", "lookup")
_FAMILIES: Mapping[str, Any] = {  # by kind of checkpoint
    "dspark": DSparkDrafter,
    "deepseek-v4": DeepseekV4Drafter,
    "dflash": DFlashDrafter,
    "dflash2": DFlash2Drafter,
    "eagle3": Eagle3Drafter,
    "draft-model": DraftModelDrafter,
}
_NAMED = frozenset({"bits", "window", "model", "confidence_threshold"})  # by load_drafter itself
_MOST_DRAFTS = 1024  # a round; a config.json that says more is damaged
# Tensors that only heads of other algorithms have, and whose they are.
_FOREIGN = {
    "mtp.": "a multi-token-prediction layer without a DSpark head",
    "medusa_head.": "Medusa heads",
    "layer_fusion_weights": "a DFly head",
    "hidden_correction.": "a DFly head",
    "aux_hidden_norms.": "a Laguna head",
    "context_proj.": "a DFly head",
    "target_model.": "a drafter with its whole target inside",
}


def load_drafter(
    path_or_id: Path | str | None,
    target: Target,
    *,
    mode: str = "auto",
    model: str | None = None,
    bits: int = 4,
    window: int = 4096,
    confidence_threshold: float | None = None,
    lookup_drafts: bool | None = None,
    **options: Any,
) -> Drafter:
    """Load what drafts for a target.

    Args:
        path_or_id: Folder, GGUF file or hub id of a drafter, or of a model with draft stages
            inside, or folder or id of a small model; None takes the stages inside `model`, where it
            has some, or asks the known pairs.
        target: The model it drafts for.
        mode: "auto", or the kind that must come out: "dspark", "dflash" (DFlash 2 included),
            "eagle3", "draft-model", "lookup".
        model: Name or folder of the target, to find its pair, and its vocabulary where the target
            does not say in `folder` what it was loaded from.
        bits: 4 or 8 quantises the drafter's linears and embeddings at load; a checkpoint that is
            quantised already stays as it is. 16 computes with plain matrices, unpacked if need be:
            the fastest on a CPU with a fast BLAS, which quantised products do not use.
        window: Context rows that a bidirectional head sees, the newest; 0 for all.
        confidence_threshold: DSpark only: cut drafts at the first slot less sure than this; the
            pair's without, or 0.
        lookup_drafts: Put lookup in front (`HybridDrafter`), or have none at all; without it what
            the pair says in mode "auto", and no lookup in any other mode.
        options: Further options of the drafter's class.

    Raises:
        LoadError: the checkpoint does not fit the target or the mode, or is of a kind that is not
            supported. In mode "auto" without a checkpoint a known drafter that cannot be loaded
            gives a warning and lookup instead.
        ValueError: no such mode.
        TypeError: the drafter's class has no such option.
    """
    if mode not in MODES:
        raise ValueError(f'[load] mode must be one of {", ".join(MODES)}, got "{mode}".')
    if mode == "lookup":
        return _lookup(confidence_threshold, lookup_drafts, options)
    settings = {"bits": bits, "window": window, "model": model, **options}
    settings["confidence_threshold"] = confidence_threshold
    if path_or_id is not None:
        drafter = _load(path_or_id, target, mode, settings)
        return _with_lookup(drafter, mode == "auto" if lookup_drafts is None else lookup_drafts)
    own = own_drafts(model) if model is not None and mode in ("auto", "dspark") else None
    if own is not None:
        return _load_or_lookup(own, target, mode, settings, lookup_drafts, mode == "auto")
    pair = find_pair(model) if model is not None else None
    found = pair.drafter_for(mode) if pair is not None else None
    if pair is None or found is None:
        if mode == "auto":
            return _lookup(confidence_threshold, lookup_drafts, options)
        other = find_other(model, mode) if model is not None else None
        whom = "this target" if model is None else f'"{model}"'
        such = f', such as "{other}",' if other is not None else ","
        raise LoadError(
            f'[load] Mode "{mode}" needs a drafter for {whom}, and no pair is known. '
            f'Pass one{such} or use mode "lookup".'
        )
    return _load_known(pair, found, target, mode, settings, lookup_drafts)


def _lookup(
    threshold: float | None, lookup_drafts: bool | None, options: Mapping[str, Any]
) -> LookupDrafter:
    """Lookup alone; what it would silently ignore is refused."""
    if threshold:
        raise LoadError(
            "[load] A confidence threshold needs a drafter with a confidence head, and what runs "
            "here is lookup. Name a drafter, or leave the threshold at 0."
        )
    if lookup_drafts is False:
        raise LoadError(
            "[load] Without lookup a drafter is needed, and none is named or known for this "
            'target. Name one, or use mode "baseline".'
        )
    _refuse_unknown(options, LookupDrafter)
    return LookupDrafter(**options)


def _refuse_unknown(options: Mapping[str, Any], family: type) -> None:
    """Refuse options that a drafter's class, or its own loader, does not take.

    Raises:
        TypeError: one of them; the message has those that there are.
    """
    load = getattr(family, "load", family)
    takes = [*signature(family).parameters.values(), *signature(load).parameters.values()]
    known = {p.name for p in takes if p.default is not p.empty} - _NAMED
    for name in sorted(set(options) - _NAMED - known):
        near = get_close_matches(name, known, n=1)
        raise TypeError(
            f"[load] Options of {family.__name__} must be among {', '.join(sorted(known))}, got "
            f'"{name}". ' + (f'Did you mean "{near[0]}"?' if near else "Leave it out.")
        )


def _load_known(
    pair: KnownPair,
    found: str,
    target: Target,
    mode: str,
    settings: dict[str, Any],
    lookup_drafts: bool | None,
) -> Drafter:
    """A registered pair's drafter, with what the table says about it."""
    if settings["confidence_threshold"] is None:
        settings["confidence_threshold"] = pair.confidence_threshold
    in_front = pair.lookup and mode == "auto"
    return _load_or_lookup(found, target, mode, settings, lookup_drafts, in_front)


def _load_or_lookup(
    found: Path | str,
    target: Target,
    mode: str,
    settings: dict[str, Any],
    lookup_drafts: bool | None,
    in_front: bool,
) -> Drafter:
    """A drafter that nobody named; in mode "auto" one that cannot be loaded gives way to lookup."""
    try:
        drafter = _load(found, target, "auto", settings)
    except LoadError as error:
        if mode != "auto" or lookup_drafts is False:
            raise
        warnings.warn(f"Drafting by lookup: {error}", RuntimeWarning, stacklevel=4)
        return LookupDrafter()
    return _with_lookup(drafter, in_front if lookup_drafts is None else lookup_drafts)


def _with_lookup(drafter: Drafter, in_front: bool) -> Drafter:
    return HybridDrafter(drafter) if in_front else drafter


def _load(name: Path | str, target: Target, mode: str, settings: dict[str, Any]) -> Drafter:
    folder = locate(name)
    with _blamed_on_config(folder, ()):
        checkpoint = open_checkpoint(folder)
        kind = detect(checkpoint)
    _refuse_unknown(settings, _FAMILIES[kind])
    with _blamed_on_config(folder, sorted(settings.keys() - _NAMED)):
        drafter = _made(checkpoint, kind, target, mode, settings)
    _try_out(drafter, target, folder.name)
    return drafter


@contextmanager
def _blamed_on_config(folder: Path, options: Sequence[str]) -> Iterator[None]:
    """Settings of a wrong kind fail in any way, and so do options that were given."""
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        what = "sound settings in config.json"
        if options:
            what += f" and sound options, here {', '.join(options)}"
        raise LoadError(
            f'[load] Drafter "{folder.name}" must have {what}, and fails '
            f"with: {one_line(error, 200)}. Use lookup, or another drafter."
        ) from error


def _try_out(drafter: Drafter, target: Target, name: str) -> None:
    """Draft once, so that one that cannot is refused here and not by the first request.

    Raises:
        LoadError: it breaks off, or promises more drafts than make sense.
    """
    if not 1 <= drafter.max_draft <= _MOST_DRAFTS:
        raise LoadError(
            f'[load] Drafter "{name}" must draft 1..{_MOST_DRAFTS} tokens a round, got '
            f"{drafter.max_draft}. Correct its block size, or use lookup or another drafter."
        )
    prompt = [1, 2, 3]
    try:
        output = target.prefill(prompt, target.make_cache(), taps=drafter.taps)
        drafter.observe(prompt, output)
        key = mx.random.key(0)
        draft = drafter.draft(1, drafter.max_draft, sampling=Sampling(), key=key)
        host_ints(draft.tokens)  # sync: once, at load
    except Exception as error:  # whatever a checkpoint of wrong values leads to
        raise LoadError(
            f'[load] Drafter "{name}" must be able to draft for this target, and breaks off: '
            f"{one_line(error, 200)}. Use lookup, or another drafter."
        ) from error
    drafter.reset()


def _made(
    checkpoint: Checkpoint, kind: str, target: Target, mode: str, settings: dict[str, Any]
) -> Drafter:
    folder = checkpoint.path
    wanted = {"dflash2": "dflash", "deepseek-v4": "dspark"}.get(kind, kind)
    if mode not in ("auto", wanted):
        raise LoadError(
            f'[load] Mode "{mode}" needs a checkpoint of that kind, got a "{wanted}" one in '
            f'"{folder.name}". Use mode "{wanted}" or "auto".'
        )
    threshold = settings.pop("confidence_threshold") or 0.0
    if threshold > 0 and wanted != "dspark":
        raise LoadError(
            f'[load] A confidence threshold needs a confidence head, got a "{wanted}" drafter in '
            f'"{folder.name}". Leave the threshold at 0.'
        )
    if kind == "draft-model":
        kept = {k: v for k, v in settings.items() if k not in ("bits", "window")}
        return DraftModelDrafter.load(folder, target, **kept)
    settings.pop("model")
    _check_words(folder, target)
    if kind in ("eagle3", "deepseek-v4"):
        settings.pop("window")
    if wanted == "dspark":
        settings["confidence_threshold"] = threshold
    return _FAMILIES[kind](checkpoint, target, **settings)


def _check_words(folder: Path, target: Target) -> None:
    """Refuse a head that comes with a tokenizer of other words than the target's.

    Raises:
        LoadError: an id that both have stands for two strings.
    """
    theirs = getattr(target, "folder", None)
    files = [] if theirs is None else [folder / "tokenizer.json", theirs / "tokenizer.json"]
    if files and all(file.is_file() for file in files):
        check_same_vocabulary(*files)


def detect(checkpoint: Checkpoint) -> str:
    """Kind of a checkpoint: "dspark", "deepseek-v4", "dflash", "dflash2", "eagle3", "draft-model".

    Raises:
        LoadError: another algorithm's.
    """
    config, shapes = checkpoint.config, checkpoint.shapes
    if carries_drafts(shapes):
        return "deepseek-v4"
    _refuse_foreign(config, shapes)
    if is_speculators(config):
        algorithm(config)
    if is_eagle3(config, shapes):
        return "eagle3"
    if "fc.weight" in shapes or "hidden_norm.weight" in shapes:
        return block_family(config, shapes, checkpoint.lineage)
    if "embed_tokens.weight" in shapes:
        return "draft-model"
    raise LoadError(
        f'[load] "{checkpoint.path.name}" must hold a DSpark, DFlash or EAGLE-3 head, or a model, '
        f"got {len(shapes)} tensors of neither. Use lookup, or another drafter."
    )


def _refuse_foreign(config: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    for marker, whose in _FOREIGN.items():
        if any(name.startswith(marker) for name in shapes):
            raise LoadError(
                f"[load] The checkpoint must hold a DSpark, DFlash or EAGLE-3 head, got {whose}. "
                "Use lookup, or another drafter for this target."
            )
    if "block_size" not in config and any(key.startswith("dspark_") for key in config):
        raise LoadError(
            '[load] A full model whose config.json has "dspark_" settings must hold its draft '
            'stages as "mtp." tensors, got none. A conversion dropped them: pass the original '
            "checkpoint as drafter."
        )
