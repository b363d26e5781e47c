"""What the machine is called by who built it."""

from launcher.probe.sysfs import Tree

DMI = "sys/class/dmi/id"
DEVICE_TREE = "sys/firmware/devicetree/base/model"
PLACEHOLDERS = frozenset((
    "to be filled by o.e.m.", "to be filled by oem", "system product name", "system name", "product name",
    "default string", "not specified", "not applicable", "not available", "unknown", "undefined", "invalid",
    "none", "n/a", "na", "o.e.m.", "oem", "empty", "null", "type1productconfigid", "0123456789",
))  # fmt: skip
"""What firmware says where nobody filled the name in, in lower case."""
LONGEST = 100
"""Characters of a name at most."""


def read_product_name(tree: Tree) -> str:
    """Product name from DMI, or on ARM from the device tree; empty where there is none."""
    text = tree.read(f"{DMI}/product_name") if tree.resolve_links(DMI) else None
    if not (name := clean_name(text or "")):
        name = clean_name(tree.read(DEVICE_TREE) or "")
    return name


def clean_name(text: str) -> str:
    """A name's printable characters, single blanks between words; empty for a placeholder.

    The device tree's texts end with a NUL.
    """
    shown = "".join(
        char if char.isprintable() else " " for char in text.replace("\ufffd", " ")[: 4 * LONGEST]
    )
    name = " ".join(shown.split())[:LONGEST].strip()
    return "" if name.lower() in PLACEHOLDERS or not any(map(str.isalnum, name)) else name
