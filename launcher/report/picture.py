"""A picture as plain values: boxes in boxes, with texts; sizes in pixels, y downwards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, log

Measure = Callable[[str, int], int]
"""The width of a text in a font size."""
GAP = 5
HATCH = 5
"""Pixels between the lines of a hatching, across and down."""
HATCH_COLOUR = "#c4c4c4"
RATIO = 1.6
"""Width over height that groups of boxes come near to."""
FRAMES = frozenset({"package", "node", "cache", "class", "switch", "group"})
"""Boxes that grow with the box around them, so that edges line up."""
CARDS = frozenset({"bare", "gpu", "nic"})
"""Boxes that are made as large as their cell of the grid, no larger."""


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text."""

    x: int
    """Left end."""
    y: int
    """Baseline."""
    text: str
    size: int
    width: int
    """As measured; a writer whose font differs fits the text into it."""
    colour: str = "#222222"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; what is in it is placed from its top left corner."""

    kind: str
    """What it stands for: `package`, `node`, `cache`, `core`, `pu`, `gpu`, `swatch` and so on."""
    width: int
    height: int
    x: int = 0
    y: int = 0
    fills: tuple[str, ...] = ()
    """Its colours, side by side in stripes; none shows what is beneath."""
    stroke: str = ""
    """Colour of its edge; empty for none."""
    hatched: bool = False
    texts: tuple[Text, ...] = ()
    parts: tuple["Box", ...] = ()

    def move(self, x: int, y: int) -> "Box":
        """The same box elsewhere."""
        return replace(self, x=x, y=y)


def walk_boxes(box: Box, x: int = 0, y: int = 0) -> Iterator[tuple[Box, int, int]]:
    """Give a box and all that are in it, outer ones first, each with its place in the picture."""
    x, y = x + box.x, y + box.y
    yield box, x, y
    for part in box.parts:
        yield from walk_boxes(part, x, y)


def arrange(boxes: Sequence[Box], ratio: float = RATIO, gap: int = GAP) -> Box:
    """Put boxes into a grid, row by row, whose shape comes near to the ratio and leaves little empty."""
    best, least = [boxes], inf
    area = sum(box.width * box.height for box in boxes)
    for columns in range(1, len(boxes) + 1):
        rows = [boxes[at : at + columns] for at in range(0, len(boxes), columns)]
        width, height = sum(find_widths(rows)), sum(find_heights(rows))
        empty = width * height / area - 1
        score = abs(log(width / height / ratio)) + 6 * empty
        if score < least:
            best, least = rows, score
    return place_rows(best, gap)


def place_rows(rows: Sequence[Sequence[Box]], gap: int) -> Box:
    """Place boxes in rows and columns; returns a group without an edge."""
    widths, heights = find_widths(rows), find_heights(rows)
    placed, y = [], 0
    for row, height in zip(rows, heights, strict=True):
        x = 0
        for box, width in zip(row, widths, strict=False):
            placed.append(stretch(box, width, height).move(x, y))
            x += width + gap
        y += height + gap
    return Box("group", sum(widths) + gap * (len(widths) - 1), y - gap, parts=tuple(placed))


def stretch(box: Box, width: int, height: int) -> Box:
    """Make a box as large as its cell, and a frame that is alone in it larger by as much."""
    if box.kind not in FRAMES | CARDS:
        return box
    parts = box.parts
    if len(parts) == 1 and parts[0].kind in FRAMES:
        (only,) = parts
        parts = (stretch(only, only.width + width - box.width, only.height + height - box.height),)
    return replace(box, width=width, height=height, parts=parts)


def find_widths(rows: Sequence[Sequence[Box]]) -> list[int]:
    """The width of each column."""
    return [max(row[at].width for row in rows if at < len(row)) for at in range(len(rows[0]))]


def find_heights(rows: Sequence[Sequence[Box]]) -> list[int]:
    """The height of each row."""
    return [max(box.height for box in row) for row in rows]


def stack_lines(measure: Measure, lines: Sequence[str], size: int, left: int, top: int) -> tuple[Text, ...]:
    """Set lines below each other, left aligned; each takes `size + 4` pixels."""
    return tuple(
        Text(left, top + size + at * (size + 4), line, size, measure(line, size))
        for at, line in enumerate(lines)
    )


def center_text(
    measure: Measure, text: str, size: int, width: int, *, baseline: int, colour: str
) -> tuple[Text, ...]:
    """Set a text in the middle of a width; none where it is empty."""
    long = measure(text, size)
    return (Text((width - long) // 2, baseline, text, size, long, colour),) if text else ()


def frame(
    kind: str, texts: Sequence[Text], contents: Sequence[Box], *, fill: str, stroke: str = "#888888"
) -> Box:
    """Make a box around a heading and what is below it."""
    below = max((text.y + 4 for text in texts), default=0) + GAP // 2
    content = contents[0] if len(contents) == 1 else arrange(contents) if contents else Box("group", 0, 0)
    width = max(content.width + 2 * GAP, *(text.x + text.width + GAP for text in texts), 0)
    height = below + content.height + GAP if content.height else below + 2
    parts = (stretch(content, width - 2 * GAP, content.height).move(GAP, below),) if contents else ()
    return Box(kind, width, height, fills=(fill,), stroke=stroke, texts=tuple(texts), parts=parts)
