"""Colours of the ranks, told apart by colour-blind people too."""

PALETTE = (
    "#88ccee",
    "#cc6677",
    "#ddcc77",
    "#117733",
    "#332288",
    "#44aa99",
    "#aa4499",
    "#999933",
    "#882255",
)
"""Paul Tol's "muted" scheme (https://personal.sron.nl/~pault/, SRON/EPS/TN/09-002); ranks beyond the ninth
begin again, with their own numbers."""
DARK, LIGHT = "#222222", "#ffffff"


def find_colour(rank: int) -> str:
    """The colour of a rank."""
    return PALETTE[rank % len(PALETTE)]


def lighten(colour: str) -> str:
    """The light tint of a colour."""
    return "#" + "".join(f"{255 - (255 - value) * 3 // 10:02x}" for value in split_colour(colour))


def find_ink(*fills: str) -> str:
    """Black or white, whichever reads better on these colours (relative luminance of WCAG 2, simplified)."""
    dark = [sum(w * v for w, v in zip((0.2, 0.7, 0.1), split_colour(fill), strict=True)) for fill in fills]
    return LIGHT if dark and sum(dark) / len(dark) < 125 else DARK


def split_colour(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`, 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
