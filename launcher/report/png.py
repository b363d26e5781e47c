"""A picture as PNG, by Pillow, with the font that it carries."""

from collections.abc import Iterator
from functools import cache
from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from launcher.report.picture import HATCH, HATCH_COLOUR, Box, walk_boxes


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
