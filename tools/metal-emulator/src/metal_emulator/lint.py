"""What the emulator cannot see in kernel text and Apple's compiler will not accept.

The emulator compiles C++, which is more than the Metal Shading Language allows. This finds
pointers and references without an address space, and words that do not exist there. Knows text,
runs nothing.
"""

import re

from metal_emulator.rewrite import blank_noise

SPACES = ("device", "constant", "threadgroup", "thread")
_TYPES = (
    "void|bool|char|uchar|short|ushort|int|uint|long|ulong|float|half|bfloat|size_t|auto|"
    r"u?int(?:8|16|32|64)_t|b?float16_t|(?:float|half|bfloat|u?int|u?short|u?char)[234]|"
    r"vec<[^<>]*>|atomic<[^<>]*>|atomic_\w+|simdgroup_matrix<[^<>]*>|[A-Z][A-Za-z0-9]*"
)
_POINTER = re.compile(
    rf"(?P<before>(?:\b\w+\s+)*?)\b(?P<type>{_TYPES})\s*(?P<mark>[*&])(?![*&=])\s*"
    r"(?:const\s+)?(?P<after>[A-Za-z_)\]>,]|\()"
)
_FORBIDDEN = (
    (re.compile(r"\bstd\s*::"), "std:: does not exist in Metal; use metal:: or plain C"),
    (re.compile(r"\bdouble\b"), "double does not exist in Metal; use float"),
    (re.compile(r"\bprintf\b"), "printf does not exist in Metal"),
    (re.compile(r"\b(?:new|delete|virtual|throw|try|dynamic_cast|goto)\b"), "not allowed in Metal"),
    (re.compile(r"\b\d+\.\d*(?:e[+-]?\d+)?[lL]\b"), "long double literals do not exist in Metal"),
)
_EXPRESSION = set("+-/%=(<>!&|?:,[*~^")


def lint(text: str) -> list[str]:
    """Problems of kernel text, as "line N: what"; empty if there are none.

    Args:
        text: header and source of a kernel.
    """
    clean = blank_noise(text)
    problems = [
        (_line(clean, found.start()), message)
        for pattern, message in _FORBIDDEN
        for found in pattern.finditer(clean)
    ]
    problems += [
        (_line(clean, found.start("type")), f'"{_shown(found)}" needs an address space')
        for found in _POINTER.finditer(clean)
        if _lacks_space(clean, found)
    ]
    return [f"line {line}: {message}" for line, message in sorted(set(problems))]


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _shown(found: re.Match) -> str:
    return f"{found['type']}{found['mark']}"


def _lacks_space(clean: str, found: re.Match) -> bool:
    """Whether this is a pointer or reference declarator with no address space before its type."""
    before = clean[: found.start("type")]
    words = re.findall(r"[A-Za-z_]\w*|[^\sA-Za-z_]", before)[-3:]
    if any(word in SPACES for word in words):
        return False
    after = clean[found.end("mark") :].lstrip()
    if re.match(r"\w+\s*[;,)=:[{]|\)|const\b", after) is None:
        return False
    return not _is_product(found, words)


def _is_product(found: re.Match, words: list[str]) -> bool:
    """`a * b` of two values: the left side is a constant name, after an operator or a return."""
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", found["type"]):
        return False
    if not words:
        return False
    return words[-1] in _EXPRESSION or words[-1].isdigit() or words[-1] == "return"
