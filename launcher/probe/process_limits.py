"""Limits of this process and its cgroup on descriptors, locked memory and processes."""

from launcher.probe.cgroups import list_cgroups
from launcher.probe.health import Ceiling
from launcher.probe.limits import FILES, RESOURCES, find_resource
from launcher.probe.sysfs import Tree, parse_unsigned


def read_ceilings(tree: Tree) -> dict[str, Ceiling]:
    """The resource limits by the kernel's names (`Max open files`); none where the file is not there."""
    text = tree.read(RESOURCES)
    if text is None:
        return {}
    found = {}
    for name in (FILES, "Max locked memory", "Max processes"):
        line = find_resource(text, name)
        words = line.removeprefix(name).split()
        if len(words) >= 2 and all(is_limit(word) for word in words[:2]):
            found[name] = Ceiling(read_limit(words[0]), read_limit(words[1]))
        else:
            tree.add_warning(f"{RESOURCES} has {{value}} for {name}, which is no limit", value=line)
    return found


def is_limit(word: str) -> bool:
    """Whether a word is a number or `unlimited`."""
    return word == "unlimited" or (word.isascii() and word.isdecimal() and len(word) <= 20)


def read_limit(word: str) -> int | None:
    """A limit's number; None for no limit."""
    return None if word == "unlimited" else int(word)


def read_pids_max(tree: Tree) -> int | None:
    """The lowest `pids.max` of the job's cgroup and those above it; None where nothing limits.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/pids.rst.
    """
    _, paths = list_cgroups(tree, ("pids",)).get("pids", (2, []))
    found = [number for path in paths if (number := parse_unsigned(tree.read(f"{path}/pids.max") or ""))]
    return min(found, default=None)
