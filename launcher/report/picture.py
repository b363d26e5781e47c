"""A picture as plain values, boxes in boxes with texts, and its two files: SVG, and PNG by Pillow."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from math import inf, log
from xml.etree import ElementTree

from PIL import Image, ImageDraw, ImageFont

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
NAMESPACE = "http://www.w3.org/2000/svg"
FONTS = "Helvetica, Arial, sans-serif"


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
    best, lowest = [boxes], inf
    area = sum(box.width * box.height for box in boxes)
    for columns in range(1, len(boxes) + 1):
        rows = [boxes[at : at + columns] for at in range(0, len(boxes), columns)]
        width, height = sum(find_widths(rows)), sum(find_heights(rows))
        empty = width * height / area - 1
        score = abs(log(width / height / ratio)) + 6 * empty
        if score < lowest:
            best, lowest = rows, score
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
    """Set a text in the middle of a width; none if it is empty."""
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


def render_svg(picture: Box) -> bytes:
    """Write a picture as an SVG document, UTF-8."""
    size = {"width": str(picture.width), "height": str(picture.height)}
    view = {"viewBox": f"0 0 {picture.width} {picture.height}", "font-family": FONTS}
    root = ElementTree.Element("svg", {"xmlns": NAMESPACE, **size, **view})
    add_hatching(root)
    for box, x, y in walk_boxes(picture):
        add_box(root, box, x, y)
        for text in box.texts:
            add_text(root, text, x, y)
    document = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{document}\n'.encode()


def add_hatching(root: ElementTree.Element) -> None:
    """Define the hatching that boxes refer to."""
    pattern = ElementTree.SubElement(
        ElementTree.SubElement(root, "defs"),
        "pattern",
        {"id": "hatching", "width": str(HATCH), "height": str(HATCH), "patternUnits": "userSpaceOnUse"},
    )
    line = f"M-1,-1 L{HATCH + 1},{HATCH + 1}"
    ElementTree.SubElement(pattern, "path", {"d": line, "stroke": HATCH_COLOUR})


def add_box(root: ElementTree.Element, box: Box, x: int, y: int) -> None:
    """Add stripes, hatching and edge of a box."""
    for at, fill in enumerate(box.fills):
        left, right = (box.width * n // len(box.fills) for n in (at, at + 1))
        add_rectangle(root, (x + left, y, right - left, box.height), fill=fill)
    if box.hatched:
        add_rectangle(root, (x, y, box.width, box.height), fill="url(#hatching)")
    if box.stroke:  # in the middle of the edge's pixels
        edge = (x + 0.5, y + 0.5, box.width - 1, box.height - 1)
        add_rectangle(root, edge, fill="none", stroke=box.stroke, kind=box.kind)


def add_rectangle(
    root: ElementTree.Element,
    place: tuple[float, float, float, float],
    *,
    fill: str,
    stroke: str = "",
    kind: str = "",
) -> None:
    """Add a rectangle of x, y, width and height."""
    values = {name: f"{value:g}" for name, value in zip(("x", "y", "width", "height"), place, strict=True)}
    more = {name: value for name, value in (("stroke", stroke), ("class", kind)) if value}
    ElementTree.SubElement(root, "rect", {**values, "fill": fill, **more})


def add_text(root: ElementTree.Element, text: Text, x: int, y: int) -> None:
    """Add a text, fitted into the width that was measured for it, since the viewer's font may differ."""
    values = {"x": x + text.x, "y": y + text.y, "font-size": text.size, "textLength": max(text.width, 1)}
    attributes = {name: str(value) for name, value in values.items()}
    element = ElementTree.SubElement(
        root, "text", {**attributes, "lengthAdjust": "spacingAndGlyphs", "fill": text.colour}
    )
    element.text = text.text


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The built-in font in a size."""
    return ImageFont.load_default(size)


def measure_text(text: str, size: int) -> int:
    """The width of a text in pixels."""
    return round(load_font(size).getlength(text))


def render_png(picture: Box) -> bytes:
    """Draw a picture in its size."""
    image = Image.new("RGB", (picture.width, picture.height), "white")
    drawing = ImageDraw.Draw(image)
    for box, x, y in walk_boxes(picture):
        draw_box(drawing, box, x, y)
        for text in box.texts:
            at = (x + text.x, y + text.y)
            drawing.text(at, text.text, fill=text.colour, font=load_font(text.size), anchor="ls")
    output = BytesIO()
    image.save(output, "PNG")
    return output.getvalue()


def draw_box(drawing: ImageDraw.ImageDraw, box: Box, x: int, y: int) -> None:
    """Draw stripes, hatching and edge of a box; each pixel row and column belongs to it alone."""
    right, bottom = x + box.width - 1, y + box.height - 1
    for at, fill in enumerate(box.fills):
        left = x + box.width * at // len(box.fills)
        drawing.rectangle((left, y, x + box.width * (at + 1) // len(box.fills) - 1, bottom), fill=fill)
    for start, end in hatch_lines(box.width - 1, box.height - 1) if box.hatched else ():
        drawing.line((x + start[0], y + start[1], x + end[0], y + end[1]), fill=HATCH_COLOUR)
    if box.stroke:
        drawing.rectangle((x, y, right, bottom), outline=box.stroke)


def hatch_lines(width: int, height: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Give the ends of the diagonals that hatch a rectangle, falling to the right."""
    for offset in range(HATCH - height, width, HATCH):
        yield (
            (max(offset, 0), max(-offset, 0)),
            (min(width, height + offset), min(height, width - offset)),
        )
