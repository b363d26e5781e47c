"""A picture as SVG."""

from xml.etree import ElementTree

from launcher.report.picture import HATCH, HATCH_COLOUR, Box, Text, walk_boxes

NAMESPACE = "http://www.w3.org/2000/svg"
FONTS = "Helvetica, Arial, sans-serif"


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
    given = {name: str(value) for name, value in values.items()}
    element = ElementTree.SubElement(
        root, "text", {**given, "lengthAdjust": "spacingAndGlyphs", "fill": text.colour}
    )
    element.text = text.text
