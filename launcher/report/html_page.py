"""A page as plain values, sections of texts, tables and pictures, and its HTML by Jinja2, which escapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from launcher.text import tame_text

FOLDER = "html_page"
"""Of the template and the style sheet, beside this file."""


@dataclass(frozen=True, slots=True)
class Head:
    """The heading of a column."""

    text: str
    number: bool = False
    """Its cells are numbers."""


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """A table; the first cell of a row names it."""

    caption: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class LegendKey:
    """An entry of a legend."""

    text: str
    colour: int
    """Of the style sheet: `--s1` and so on."""
    form: str = ""
    """`line`, `dashed`, `span`, or empty for an area."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Pictures of the same, with what explains them."""

    caption: str
    pictures: tuple[tuple[str, str], ...]
    """Class (`wide`, `narrow`, `light`) and SVG, which is not escaped."""
    legend: tuple[LegendKey, ...] = ()
    table: HtmlTable | None = None
    """The figures behind it."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and what it is."""

    name: str
    text: str
    is_code: bool = False


@dataclass(frozen=True, slots=True)
class Advice:
    """What slowed or endangered the run, and what to do about it."""

    level: str
    """`error`, `warning` or `note`."""
    what: str
    why: str = ""
    fix: str = ""
    also: tuple[str, ...] = ()
    """What else was found for which the same holds."""


@dataclass(frozen=True, slots=True)
class StackText:
    """A stack of a rank, or of several that have the same."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Stacks that are opened and closed together."""

    title: str
    text: tuple[str, ...]
    stacks: tuple[StackText, ...]


@dataclass(frozen=True, slots=True)
class HangText:
    """A hang."""

    title: str
    sentence: str
    text: str
    groups: tuple[StackGroup, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with a heading."""

    name: str
    title: str
    text: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    findings: tuple[Advice, ...] = ()
    figures: tuple[Chart, ...] = ()
    tables: tuple[HtmlTable, ...] = ()
    hangs: tuple[HangText, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """All of it."""

    title: str
    state: str
    tone: str
    """Of the state: `good`, `bad`, `fair` or `calm`."""
    lead: str
    sections: tuple[Section, ...]
    left_out: tuple[str, ...]
    """What is not shown, and why, a line each."""
    foot: str


def render_page(page: Page) -> bytes:
    """Return the HTML; every text but pictures is escaped, and control characters are shown as escapes."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=tame_value, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(read_part("page.html.jinja"))
    text = template.render(page=page, style=Markup(read_part("page.css")))  # noqa: S704 - our own file
    return text.encode("utf-8", "backslashreplace")


def read_part(name: str) -> str:
    """Return the text of a file of the page's."""
    return files("launcher.report").joinpath(FOLDER, name).read_text(encoding="utf-8")


def tame_value(value: object) -> object:
    """Return a value for the page; what would act on a terminal or turn the direction of writing is shown."""
    return tame_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def make_chart(
    caption: str,
    pictures: Sequence[tuple[str, str]],
    legend: Sequence[LegendKey] = (),
    table: HtmlTable | None = None,
    notes: Sequence[str] = (),
) -> Chart:
    """Return a chart of pictures that this program has drawn, which are not escaped."""
    drawn = tuple((form, Markup(picture)) for form, picture in pictures if picture)  # noqa: S704 - serialized XML
    return Chart(caption, drawn, tuple(legend), table, tuple(notes))


def pair_widths(pictures: tuple[str, str]) -> list[tuple[str, str]]:
    """Return a wide and a narrow picture with the class of each."""
    return list(zip(("wide", "narrow"), pictures, strict=True))
