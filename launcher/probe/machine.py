"""Reads a machine: what the node has, and what this job may use of it."""

import os
import sys
from collections.abc import Callable, Mapping

from launcher.errors import MachineError, UsageError
from launcher.plan.model import Cache, Cpu, Machine, NumaNode
from launcher.probe.devices import probe_gpus, read_gpu_memory_nodes, read_nics
from launcher.probe.limits import STATUS, read_limits
from launcher.probe.sysfs import Tree, parse_list, parse_number, quote_content

DMI = "sys/class/dmi/id"
DEVICE_TREE = "sys/firmware/devicetree/base/model"
PLACEHOLDERS = ("to be filled by o.e.m.", "system product name", "default string", "not specified")
"""What firmware has for a name that nobody filled in, in lower case."""
LONGEST = 100
"""Characters of a name at most."""
SONAMES = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libtcmalloc_minimal.so", "libtcmalloc.so"),
    "jemalloc": ("libjemalloc.so.2", "libjemalloc.so"),
}
"""Files of the libraries that replace malloc, those that a run-time package has first."""
USUAL = ("/usr/lib64", "/usr/lib", "/usr/local/lib", "/usr/local/lib64")


def probe(root: str | os.PathLike[str] = "/", *, quick: bool = False) -> Machine:
    """Read the machine below `root`; what is odd there is told in the result's warnings.

    With another root than `/`, nothing outside it is consulted. `quick` asks the driver's files for the
    GPUs before NVML, whose library takes longer to load than all else: they tell the same but for the
    GPUs' memory, and NVML is still asked if they do not (MIG instances, GPUs that nothing has opened).

    Raises UsageError if root is no directory and MachineError if no usable CPU is found.
    """
    name = os.fspath(root)
    if not os.path.isdir(name):
        raise UsageError(
            f"machine.root={name!r} is not a directory: name one that holds sys/ and proc/ as Linux has them"
        )
    tree = Tree(name)
    status = tree.read_fields(STATUS)
    online, allowed = read_cpu_sets(tree, status)
    ids = tree.list_numbers(NODE, "node")  # the online ones; none if the kernel does without NUMA
    place = place_cpus(tree, ids, online)
    memory_kib = tree.read_meminfo().get("MemTotal", 0)
    if not memory_kib:
        tree.add_warning("proc/meminfo has no MemTotal: memory size unknown, 0 is shown")
    nodes = read_numa_nodes(tree, ids, place, memory_kib)
    known = frozenset(node.id for node in nodes)
    cpus, caches = read_cpu_topology(tree, online, place)
    return Machine(
        cpus=cpus,
        nodes=nodes,
        gpus=probe_gpus(tree, known, quick),
        allowed_cpus=allowed,
        allowed_mems=read_allowed_mems(tree, status, known),
        isolated=(tree.read_list(f"{CPU}isolated") or frozenset()) & online,
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
    shown = "".join(char if char.isprintable() and char != "\ufffd" else " " for char in text)
    name = " ".join(shown.split())[:LONGEST].strip()
    return "" if name.lower() in PLACEHOLDERS else name


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
    folders += [f"/usr/lib/{multiarch}", *USUAL]
    paths = (f"{folder}/{name}" for folder in folders for name in SONAMES.get(word, ()))
    found = (path for path in paths if path.startswith("/") and not set(path) & set(" \t\n:"))
    return next(filter(os.path.isfile, found), "")


CPU = "sys/devices/system/cpu/"
NODE = "sys/devices/system/node/"
BIG = 1024
"""Capacity of the biggest cores."""
CLASSES = {"cpu_atom": 616, "cpu_lowpower": 405}
"""Directories in sys/devices that name a hybrid x86 machine's lesser cores, and the capacity they get.

Most x86 kernels have no `cpu_capacity`; these are orders of magnitude, to tell classes apart. An
efficiency core does 0.787 of a performance core's work at the same clock (HYBRID_SCALING_FACTOR_ADL of
intel_pstate: 78741 to 100000), and a Core i9-12900K's clocks are 3.9 and 5.1 GHz: 1024 x 0.602. The
low-power ones of a Core Ultra 7 155H have 2.5 GHz for its efficiency cores' 3.8.
"""
LOCAL, REMOTE = 10, 20
"""The kernel's distances if the firmware gives none (include/linux/topology.h)."""


def read_cpu_sets(tree: Tree, status: dict[str, str]) -> tuple[frozenset[int], frozenset[int]]:
    """The online CPUs and the allowed ones among them; neither is empty.

    Raises MachineError if nothing names a CPU.
    """
    path = f"{CPU}online"
    value = status.get("Cpus_allowed_list")
    online, allowed = tree.read_list(path) or frozenset(), parse_list(value or "") or frozenset()
    if not online and not allowed:
        raise MachineError(
            f"no usable CPU below {tree.prefix or '/'}: {path} is {quote_content(tree.read(path))} and "
            f"Cpus_allowed_list of {STATUS} is {quote_content(value)}: "
            "give machine.root a directory that holds sys/ and proc/ as Linux has them"
        )
    if not allowed:
        tree.add_warning(f"Cpus_allowed_list of {STATUS} is {{value}}: all online CPUs are used", value=value)
        return online, online
    if not allowed & online:
        # Seen with lxcfs, which renumbers `online` for a container; the affinity is the scheduler's word.
        text = f"no CPU of Cpus_allowed_list ({{items}}) is in {path} ({{value}}): taken as online"
        tree.add_warning(text, *allowed, value=tree.read(path))
        online = allowed
    return online, allowed & online


def read_allowed_mems(tree: Tree, status: dict[str, str], nodes: frozenset[int]) -> frozenset[int]:
    """The online NUMA nodes whose memory this job may use; all of them if nothing says."""
    value = status.get("Mems_allowed_list")
    if allowed := (parse_list(value or "") or frozenset()) & nodes:
        return allowed
    text = f"Mems_allowed_list of {STATUS} is {{value}}: every NUMA node's memory is used"
    tree.add_warning(text, value=value)
    return nodes


def read_cpu_topology(
    tree: Tree, online: frozenset[int], place: dict[int, int]
) -> tuple[tuple[Cpu, ...], tuple[Cache, ...]]:
    """The online CPUs and the last-level caches, each in ascending order; `place` has the NUMA nodes.

    A core is never taken to span NUMA nodes. Where the firmware names no package (-1 in some ARM guests), a
    NUMA node is one; where the last-level cache is unknown one for each node is assumed, and not listed.
    """

    def read_siblings(cpu: int) -> frozenset[int] | None:
        threads = tree.read_list(f"{CPU}cpu{cpu}/topology/thread_siblings_list")
        return threads and frozenset(other for other in threads if place.get(other) == place[cpu])

    tops: dict[int, tuple[int, int]] = {}
    """Level and size of the last cache above a core."""

    def read_last_cache(cpu: int) -> frozenset[int] | None:
        here = f"{CPU}cpu{cpu}/cache"
        index = max(tree.list_numbers(here, "index"), default=0)  # the kernel numbers them by their level
        level = tree.read_number(f"{here}/index{index}/level") or 0
        if not 1 <= level < 10:
            return None
        size = tree.read(f"{here}/index{index}/size") or ""  # missing in many VMs
        tops[cpu] = level, parse_number(size.removesuffix("K")) or 0
        return tree.read_list(f"{here}/index{index}/shared_cpu_list")

    cores, bad = _group_cpus(sorted(place), read_siblings)
    if bad:
        text = "thread_siblings_list of CPUs {items} is {value}: each is taken as a core of its own"
        tree.add_warning(text, *bad, value=tree.read(f"{CPU}cpu{bad[0]}/topology/thread_siblings_list"))
    cores.update((cpu, cpu) for cpu in bad)
    firsts = sorted(set(cores.values()))
    above, bad = _group_cpus(firsts, read_last_cache)
    caches = {above[cpu]: Cache(above[cpu], *top) for cpu, top in tops.items() if cpu in above}
    if bad:
        tree.add_warning("last-level cache of CPUs {items} is unknown: one for each NUMA node assumed", *bad)
    shared: dict[int, int] = {}
    above.update((cpu, shared.setdefault(place[cpu], cpu)) for cpu in bad)
    capacities = _read_capacities(tree, firsts)
    packages: dict[int, int] = {}
    for core in firsts:
        package = tree.read_number(f"{CPU}cpu{core}/topology/physical_package_id")
        packages[core] = place[core] if package is None else package
    cpus = []
    for cpu in sorted(online):
        core = cores[cpu]
        cpus.append(Cpu(cpu, core, packages[core], place[cpu], above[core], capacities.get(core, BIG)))
    return tuple(cpus), tuple(caches[number] for number in sorted(caches))


def _group_cpus(
    cpus: list[int], read: Callable[[int], frozenset[int] | None]
) -> tuple[dict[int, int], list[int]]:
    """Gather CPUs in the sets that `read` gives: the lowest member for each CPU, and the unreadable ones.

    A set is read once, from its first member; a CPU whose own file is bad is found through its peers', and
    one that is in several sets is in the first.
    """
    lowest: dict[int, int] = {}
    bad: list[int] = []
    known = frozenset(cpus)
    for cpu in cpus:
        if cpu not in lowest:
            members = read(cpu) or frozenset()
            if cpu in members:
                fresh = (members & known) - lowest.keys()
                lowest.update(dict.fromkeys(fresh, min(fresh)))
            else:
                bad.append(cpu)
    return lowest, [cpu for cpu in bad if cpu not in lowest]


def _read_capacities(tree: Tree, firsts: list[int]) -> dict[int, int]:
    """Capacities of cores by their first CPU; those of big ones may be left out."""
    if tree.read(f"{CPU}cpu{firsts[0]}/cpu_capacity") is not None:
        found = {cpu: tree.read_number(f"{CPU}cpu{cpu}/cpu_capacity") or 0 for cpu in firsts}
        return {cpu: capacity for cpu, capacity in found.items() if 0 < capacity <= BIG}
    capacities: dict[int, int] = {}
    if tree.read("sys/devices/cpu_core/cpus") is not None:  # a hybrid x86 machine
        for name, capacity in CLASSES.items():
            cpus = tree.read_list(f"sys/devices/{name}/cpus") or frozenset()
            capacities.update(dict.fromkeys(cpus.intersection(firsts), capacity))
    return capacities


def place_cpus(tree: Tree, ids: list[int], online: frozenset[int]) -> dict[int, int]:
    """The NUMA node of each online CPU, the first that lists it; node 0 if the kernel does without NUMA."""
    place: dict[int, int] = {}
    for node in ids:
        cpus = tree.read_list(f"{NODE}node{node}/cpulist") or frozenset()
        place.update(dict.fromkeys(cpus & online - place.keys(), node))
    first = ids[0] if ids else 0
    strays = online - place.keys()
    if strays and ids:
        tree.add_warning(f"CPUs {{items}} are in no NUMA node's cpulist: taken as node {first}'s", *strays)
    return place | dict.fromkeys(strays, first)


def read_numa_nodes(
    tree: Tree, ids: list[int], place: dict[int, int], memory_kib: int
) -> tuple[NumaNode, ...]:
    """The online NUMA nodes; if the kernel has no NUMA support, one that has everything.

    Memory may be bound if it is the kernel's normal memory, or next to CPUs (a kernel that was started with
    `movable_node` lists no node that was plugged in as normal), and not a GPU's.
    """
    if not ids:
        return (NumaNode(0, memory_kib, True, ((0, LOCAL),)),)
    sizes = {node: tree.read_meminfo(f"{NODE}node{node}/meminfo").get("MemTotal", 0) for node in ids}
    normal = tree.read_list(f"{NODE}has_normal_memory") or frozenset()
    beside = {node for node in place.values() if sizes[node]}
    bound = (normal | beside) - read_gpu_memory_nodes(tree)
    nodes = []
    for node in ids:
        path = f"{NODE}node{node}/distance"
        values = [parse_number(word) or 0 for word in (tree.read(path) or "").split()]
        if len(values) != len(ids) or values[ids.index(node)] != LOCAL:
            text = "distance of NUMA nodes {items} is {value}: 10 and 20 are assumed"
            tree.add_warning(text, node, value=tree.read(path))
            values = [LOCAL if other == node else REMOTE for other in ids]
        nodes.append(NumaNode(node, sizes[node], node in bound, tuple(zip(ids, values, strict=True))))
    return tuple(nodes)
