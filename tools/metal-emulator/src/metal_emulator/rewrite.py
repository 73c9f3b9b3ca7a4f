"""The few changes that turn kernel text into C++: threadgroup storage becomes a slot.

Line numbers stay as they are. Knows the syntax of declarations, nothing about meaning.
"""

import re

from metal_emulator.errors import EmulatorError

_NOISE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", re.S)
_STORAGE = re.compile(r"(?<![\w:])threadgroup\b")
_FIRST = re.compile(r"\s*(?P<type>.*?[\s>])(?P<name>\w+)\s*(?P<bounds>(\[[^\]]*\]\s*)*)$", re.S)
_NEXT = re.compile(r"\s*(\w+)\s*((\[[^\]]*\]\s*)*)$", re.S)


def blank_noise(text: str) -> str:
    """`text` with comments and strings blanked, same length and same lines."""
    return _NOISE.sub(lambda found: re.sub(r"[^\n]", " ", found.group(0)), text)


def rewrite_threadgroup(text: str) -> str:
    """Make every `threadgroup T a[N], b;` inside a function shared by its threadgroup.

    Args:
        text: kernel text.

    Returns:
        The same text with storage declarations replaced by references into the runtime's arena.

    Raises:
        EmulatorError: a declaration that cannot be parsed.
    """
    clean = blank_noise(text)
    out: list[str] = []
    position = slot = 0
    for found in _STORAGE.finditer(clean):
        if found.start() < position or not _starts_statement(clean[: found.start()]):
            continue
        end = clean.find(";", found.end())
        declaration = clean[found.end() : end] if end >= 0 else ""
        if not _is_storage(declaration):
            continue
        replacement, slot = _replace(declaration, slot)
        missing = declaration.count("\n") - replacement.count("\n")
        out += [text[position : found.start()], replacement, "\n" * missing]
        position = end + 1
    out.append(text[position:])
    return "".join(out)


def _starts_statement(before: str) -> bool:
    before = before.rstrip()
    if not before:
        return True
    if before[-1] not in ";{}:)":  # inside a parameter list, a cast, a template argument
        return False
    if before.endswith(")"):  # `void f() threadgroup {` is none, `if (x) threadgroup ..` is one
        return re.search(r"\b(if|for|while)\s*\([^;{}]*\)$", before) is not None
    return True


def _is_storage(declaration: str) -> bool:
    flat = re.sub(r"\[[^\]]*\]", "", declaration)
    while re.search(r"<[^<>]*>", flat):
        flat = re.sub(r"<[^<>]*>", "", flat)
    return bool(flat.strip()) and not any(c in flat for c in "*&(={")


def _split(declaration: str) -> list[str]:
    parts, depth, last = [], 0, 0
    for index, char in enumerate(declaration):
        depth += (char in "<[(") - (char in ">])")
        if char == "," and depth == 0:
            parts.append(declaration[last:index])
            last = index + 1
    return [*parts, declaration[last:]]


def _replace(declaration: str, slot: int) -> tuple[str, int]:
    parts = _split(declaration)
    first = _FIRST.match(parts[0])
    rest = [_NEXT.match(part) for part in parts[1:]]
    if first is None or None in rest:
        raise EmulatorError(
            f"[rewrite] A threadgroup declaration must be `threadgroup T a[N], b;`, "
            f"got `threadgroup{declaration};`. Declare each array on its own."
        )
    items = [(first["name"], first["bounds"])]
    items += [(found[1], found[2]) for found in rest if found is not None]
    text = ""
    for name, bounds in items:
        tag = f"emu_tg_{slot}"
        text += f"typedef {first['type'].strip()} {tag}{bounds.strip()}; "
        text += f"auto& {name} = emu::tg_get<{tag}, {slot}>(); "
        slot += 1
    return text, slot
