"""An SVG document made fit for a page: identifiers of its own, the page's fonts and colours, a title."""

import re
from collections.abc import Mapping
from xml.etree import ElementTree

SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
DROPPED = ("metadata", "style")
"""Elements that say nothing in a page; a style would be the whole page's."""
SHORTHAND = re.compile(r"font:\s*(?:(?:normal|bold|italic|\d{3}) )*([\d.]+)px[^;]*")
FAMILY = re.compile(r"font-family:[^;]*;?\s*")
REFERENCE = re.compile(r"url\(#([^)]*)\)")
NUMBER = re.compile(r"-?\d+\.\d{2,}")
UNTURNED = re.compile(r"rotate\(-?0(?:\.0*)? .*")


def inline_svg(
    document: bytes,
    name: str,
    title: str,
    description: str,
    *,
    colours: Mapping[str, str] | None = None,
    tooltips: Mapping[str, str] | None = None,
    smallest: float = 0.0,
) -> str:
    """Return a document that this program has drawn as an element of a page.

    `name` is unique in the page and begins all identifiers. `colours` are replaced in the attributes `style`,
    as `#010101` by `var(--ink)`. `tooltips` are texts for groups by their identifiers. A narrow page shrinks
    the picture, at most to the share `smallest` of its width.
    """
    root = ElementTree.fromstring(document)  # noqa: S314 - this program has made it
    strip_elements(root)
    for element in root.iter():
        for key in list(element.attrib):
            rename_attribute(element, key, name, colours or {})
    add_tooltips(root, name, tooltips or {})
    drop_identifiers(root)
    describe(root, name, title, description, smallest)
    return ElementTree.tostring(root, encoding="unicode")


def strip_elements(root: ElementTree.Element) -> None:
    """Remove namespaces, the space between elements, and elements that the page has no use for."""
    for element in root.iter():
        element.tag = str(element.tag).removeprefix(SVG)
        element.tail = None
        element.text = element.text if element.tag == "text" else None
        for child in [child for child in element if str(child.tag).removeprefix(SVG) in DROPPED]:
            element.remove(child)


def rename_attribute(element: ElementTree.Element, key: str, name: str, colours: Mapping[str, str]) -> None:
    """Give an attribute its plain name, and its value the page's identifiers, fonts and colours."""
    value = element.attrib.pop(key)
    plain = "href" if key == f"{XLINK}href" else key
    if plain == "id":
        value = f"{name}-{value}"
    elif plain == "href":
        value = f"#{name}-{value.removeprefix('#')}"
    elif plain == "style":
        value = FAMILY.sub("", SHORTHAND.sub(r"font-size: \1px", value))
        for colour, variable in colours.items():
            value = value.replace(colour, variable)
    elif plain in ("d", "x", "y"):
        value = " ".join(NUMBER.sub(lambda found: f"{float(found[0]):.1f}", value).split())
    if not (plain == "transform" and UNTURNED.fullmatch(value)):
        element.set(plain, REFERENCE.sub(rf"url(#{name}-\1)", value))


def add_tooltips(root: ElementTree.Element, name: str, tooltips: Mapping[str, str]) -> None:
    """Have texts shown when the pointer rests on a group."""
    for element in root.iter():
        text = tooltips.get(str(element.get("id")).removeprefix(f"{name}-"))
        if text:
            title = ElementTree.Element("title")
            title.text = text
            element.insert(0, title)


def drop_identifiers(root: ElementTree.Element) -> None:
    """Remove the identifiers that nothing refers to."""
    values = [value for element in root.iter() for value in element.attrib.values()]
    used = {found for value in values for found in REFERENCE.findall(value)}
    used |= {value[1:] for value in values if value.startswith("#")}
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)


def describe(
    root: ElementTree.Element, name: str, title: str, description: str, smallest: float = 0.0
) -> None:
    """Give a picture a title and a description for those who do not see it, and a size that may shrink.

    It shrinks with the page to this share of its width.
    """
    width = root.attrib.pop("width", "").removesuffix("pt")
    for key in ("height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-desc")
    if width.replace(".", "").isdecimal():
        least = f"; min-width: {smallest * float(width):.0f}px" if smallest else ""
        root.set("style", f"width: {width}px{least}")
    for at, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(tag, {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(at, element)
