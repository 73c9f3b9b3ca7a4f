"""Draws round.svg: one round of speculative decoding, as the README shows it.

    python docs/images/round.py

The card has its own light background, so the picture reads alike on light and dark pages.
"""

from pathlib import Path
from xml.sax.saxutils import escape

OUT = Path(__file__).with_name("round.svg")
WIDTH, HEIGHT = 860, 400
LEFT, STEP, CHIP_W, CHIP_H = 216, 118, 102, 36
TOPS = {"draft": 86, "verify": 158, "accept": 234, "commit": 322}
INK, SOFT = "#1b2733", "#5b6875"
BLUE, BLUE_SOFT = "#1f5f99", "#dcebf8"
GREEN, GREEN_SOFT = "#2f7d4f", "#dff2e5"
ORANGE, ORANGE_SOFT = "#b3541e", "#fbe6d8"
GREY, GREY_SOFT = "#8a949e", "#f1f3f5"
BLOCK = ("Paris", ", ", "which ", "is ", "on ")
CHOICES = (", ", "which ", "lies ")


def text(x: float, y: float, words: str, *, size: int = 14, fill: str = INK, **more: str) -> str:
    """One line of text."""
    anchor, weight = more.get("anchor", "start"), more.get("weight", "400")
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def box(
    x: float, y: float, w: float, h: float, fill: str, stroke: str, dashed: bool = False
) -> str:
    """A rounded rectangle."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="1.5"{dash}/>'
    )


def chip(column: int, top: float, words: str, fill: str, stroke: str, dashed: bool = False) -> str:
    """A token in a column of the block; a space is drawn so that it can be seen."""
    x = LEFT + column * STEP
    shown = words.strip() or words
    ink = GREY if dashed else INK
    return box(x, top, CHIP_W, CHIP_H, fill, stroke, dashed) + text(
        x + CHIP_W / 2, top + 23, shown, fill=ink, anchor="middle", weight="600"
    )


def label(top: float, name: str, line: str, more: str = "") -> str:
    """What a row of the picture is."""
    parts = text(24, top + 14, name, size=16, weight="700") + text(
        24, top + 32, line, size=12, fill=SOFT
    )
    return parts + (text(24, top + 47, more, size=12, fill=SOFT) if more else "")


def arrow(path: str, colour: str) -> str:
    """A line that ends in a head."""
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" marker-end="url(#head)"/>'
    )


def draft_row() -> list[str]:
    """The anchor and what the drafter proposes to follow it."""
    top = TOPS["draft"]
    names = ("anchor", "d1", "d2", "d3", "d4")
    parts = [label(top, "draft", "the drafter proposes", "what may follow the anchor")]
    for column, (name, words) in enumerate(zip(names, BLOCK, strict=True)):
        fill, stroke = (BLUE_SOFT, BLUE) if column else (ORANGE_SOFT, ORANGE)
        x = LEFT + column * STEP + CHIP_W / 2
        parts.append(text(x, top - 7, name, size=12, fill=SOFT, anchor="middle"))
        parts.append(chip(column, top, words, fill, stroke))
    return parts


def verify_row() -> list[str]:
    """One forward of the target over the whole block."""
    top, width = TOPS["verify"], 4 * STEP + CHIP_W
    return [
        label(top, "verify", "one forward over 5 rows"),
        box(LEFT, top, width, CHIP_H, "#e9edf1", INK),
        text(LEFT + width / 2, top + 23, "target", anchor="middle", weight="700"),
    ]


def accept_row() -> list[str]:
    """What the target says after each row, as far as it counts."""
    top = TOPS["accept"]
    parts = [label(top, "accept", "longest prefix that agrees,", "then the target's own token")]
    for column, words in enumerate(CHOICES):
        good = column < 2
        fill, stroke = (GREEN_SOFT, GREEN) if good else (ORANGE_SOFT, ORANGE)
        parts.append(chip(column, top, words, fill, stroke))
        said = ("= d1, accepted", "= d2, accepted", "not d3: correction")[column]
        x = LEFT + column * STEP + CHIP_W / 2
        parts.append(text(x, top + 51, said, size=12, fill=stroke, anchor="middle"))
    x = LEFT + 3 * STEP
    parts.append(text(x, top + 16, "3 tokens emitted for one", size=13, fill=INK, weight="600"))
    parts.append(text(x, top + 33, "forward of the target", size=13, fill=INK, weight="600"))
    return parts


def commit_row() -> list[str]:
    """Which rows stay in the target's cache."""
    top = TOPS["commit"]
    parts = [label(top, "commit", "keep accepted rows,", "roll the rest back exactly")]
    for column, words in enumerate(BLOCK):
        kept = column < 3
        colours = (GREEN_SOFT, GREEN) if kept else (GREY_SOFT, GREY)
        parts.append(chip(column, top, words, *colours, dashed=not kept))
    middle = LEFT + 3.5 * STEP + CHIP_W / 2
    parts.append(
        text(
            LEFT + STEP + CHIP_W / 2, top + 54, "in the cache", size=12, fill=GREEN, anchor="middle"
        )
    )
    parts.append(text(middle, top + 54, "no trace left", size=12, fill=SOFT, anchor="middle"))
    return parts


def loop() -> list[str]:
    """From the correction back to the anchor of the next round."""
    edge = LEFT + 4 * STEP + CHIP_W + 22
    start, y = LEFT + 2 * STEP + CHIP_W / 2, TOPS["accept"] + 60
    top, anchor = 53, LEFT + CHIP_W / 2
    path = f"M {start:g} {y} V {y + 12} H {edge:g} V {top} H {anchor:g} V {top + 11}"
    return [
        arrow(path, ORANGE),
        text(
            edge - 8,
            top - 8,
            "the newest token is the next round's anchor",
            size=13,
            fill=ORANGE,
            anchor="end",
        ),
    ]


def picture() -> str:
    """The whole SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="Helvetica, Arial, sans-serif" aria-label="One round: the drafter proposes, '
        "the target verifies in one forward, the accepted prefix is committed, the rest rolled "
        'back">',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto">'
        f'<path d="M 0 0 L 10 5 L 0 10 z" fill="{ORANGE}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="14" fill="#ffffff" stroke="#c9d1d9"/>',
        text(24, 40, "The capital of France is …", size=15, fill=SOFT),
        *draft_row(),
        *verify_row(),
        *accept_row(),
        *commit_row(),
        *loop(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    OUT.write_text(picture(), encoding="utf-8")
