"""Reads a machine: what the node has, and what this job may use of it."""

import os
import sys
from collections.abc import Mapping

from launcher.errors import UsageError
from launcher.plan.model import Machine
from launcher.probe.cpus import (
    list_numa_nodes,
    place_cpus,
    read_allowed_mems,
    read_cpu_sets,
    read_cpu_topology,
    read_isolated,
    read_numa_nodes,
)
from launcher.probe.devices import probe_gpus, read_nics
from launcher.probe.limits import STATUS, read_limits
from launcher.probe.sysfs import Tree

DMI = "sys/class/dmi/id"
DEVICE_TREE = "sys/firmware/devicetree/base/model"
PLACEHOLDERS = frozenset((
    "to be filled by o.e.m.", "to be filled by oem", "system product name", "system name", "product name",
    "default string", "not specified", "not applicable", "not available", "unknown", "undefined", "invalid",
    "none", "n/a", "na", "o.e.m.", "oem", "empty", "null", "type1productconfigid", "0123456789",
))  # fmt: skip
"""Firmware's placeholders for a name that nobody filled in, in lower case."""
LONGEST = 100
"""Characters of a name at most."""
SONAMES = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libtcmalloc_minimal.so", "libtcmalloc.so"),
    "jemalloc": ("libjemalloc.so.2", "libjemalloc.so"),
}
"""Files of the libraries that replace malloc, those that a run-time package has first."""
USUAL = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib", "/usr/local/lib64")


def probe(root: str | os.PathLike[str] = "/", *, quick: bool = False) -> Machine:
    """Read the machine below `root`; what is odd there is told in the result's warnings.

    With another root than `/`, nothing outside it is consulted. `quick` asks the driver's files for the
    GPUs before NVML, whose library takes longer to load than all else: they tell the same but for the
    GPUs' memory, and NVML is still asked if they do not (MIG instances, GPUs that nothing has opened).

    Raises UsageError if root is no directory and MachineError if no usable CPU is found.
    """
    name = os.fspath(root)
    if "\0" in name or not os.path.isdir(name):
        raise UsageError(
            f"machine.root={name!r} is not a directory: name one that holds sys/ and proc/ as Linux has them"
        )
    tree = Tree(name)
    status = tree.read_fields(STATUS)
    online, allowed = read_cpu_sets(tree, status)
    ids = list_numa_nodes(tree)
    place = place_cpus(tree, ids, online)
    memory_kib = tree.read_meminfo().get("MemTotal")
    if memory_kib is None:
        text = "MemTotal of proc/meminfo is {value}: memory size unknown, 0 is shown"
        tree.add_warning(text, path="proc/meminfo")
        memory_kib = 0
    nodes = read_numa_nodes(tree, ids, place, memory_kib)
    known = frozenset(node.id for node in nodes)
    cpus, caches = read_cpu_topology(tree, online, place)
    return Machine(
        cpus=cpus,
        nodes=nodes,
        gpus=probe_gpus(tree, known, online, quick),
        allowed_cpus=allowed,
        allowed_mems=read_allowed_mems(tree, status, known),
        isolated=read_isolated(tree, online),
        memory_kib=memory_kib,
        nics=read_nics(tree, known),
        caches=caches,
        limits=read_limits(tree),
        name=read_product_name(tree),
        kernel=clean_name(tree.read("proc/sys/kernel/osrelease") or ""),
        warnings=tree.list_warnings(),
    )


def read_product_name(tree: Tree) -> str:
    """Product name from DMI, or on ARM from the device tree; empty if there is none."""
    text = tree.read(f"{DMI}/product_name") if tree.resolve_links(DMI) else None
    return clean_name(text or "") or clean_name(tree.read(DEVICE_TREE) or "")


def clean_name(text: str) -> str:
    """A name's printable characters, single blanks between words; empty for a placeholder.

    The device tree's texts end with a NUL.
    """
    text = text[: 4 * LONGEST].replace("\ufffd", " ")
    shown = "".join(char if char.isprintable() else " " for char in text)
    name = " ".join(shown.split())[:LONGEST].strip()
    return "" if name.lower() in PLACEHOLDERS or not any(map(str.isalnum, name)) else name


def locate_malloc(word: str, environ: Mapping[str, str], root: str) -> str | None:
    """Return the path of the library for `allocator.host` on this node, empty if it has none.

    The nearest to the user comes first. None for the system's malloc, and for another machine (`root`), whose
    files are not here. LD_PRELOAD separates paths by blanks and colons, so a path with one is of no use.
    """
    if word == "system" or root != "/":
        return None
    multiarch = getattr(sys.implementation, "_multiarch", "")
    folders = [
        f"{prefix}/lib" for prefix in (environ.get("CONDA_PREFIX"), sys.prefix, sys.base_prefix) if prefix
    ]
    folders += environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":")
    folders += [f"{folder}/{multiarch}" for folder in ("/lib", "/usr/lib")] + [*USUAL]
    paths = (f"{folder}/{name}" for folder in folders for name in SONAMES.get(word, ()))
    found = (path for path in paths if path.startswith("/") and not set(path) & set(" \t\n:"))
    return next(filter(os.path.isfile, found), "")
