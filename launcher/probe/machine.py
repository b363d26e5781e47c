"""Reads a machine: what the node has, and what this job may use of it."""

import os
import sys
from collections.abc import Callable, Mapping

from launcher.cpulist import format_cpulist
from launcher.errors import MachineError, UsageError
from launcher.plan.model import Cache, Cpu, Machine, NumaNode
from launcher.probe.devices import probe_gpus, read_gpu_memory_nodes, read_nics
from launcher.probe.limits import STATUS, read_limits
from launcher.probe.sysfs import Tree, parse_list, parse_number, quote_content

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


CPU = "sys/devices/system/cpu/"
NODE = "sys/devices/system/node/"
UNITS = {"K": 1, "M": 1 << 10, "G": 1 << 20}
"""KiB in the units of a cache's `size`; the kernel itself writes K."""
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
    online = tree.read_list(path)
    allowed = parse_list(value or "")
    if not online:
        # Offline CPUs have no topology directory.
        known = allowed or tree.read_list(f"{CPU}present") or frozenset(tree.list_numbers(CPU, "cpu"))
        online = frozenset(cpu for cpu in known if tree.list_directory(f"{CPU}cpu{cpu}/topology")) or known
        if not online:
            raise MachineError(
                f"no usable CPU below {tree.prefix or '/'}: {path} is {quote_content(tree.read(path))} and "
                f"Cpus_allowed_list of {STATUS} is {quote_content(value)}: "
                "give machine.root a directory that holds sys/ and proc/ as Linux has them"
            )
        tree.add_warning(f"{path} is {{value}}: CPUs {{items}} are used", *online, path=path)
    if not allowed:
        tree.add_warning(f"Cpus_allowed_list of {STATUS} is {{value}}: all online CPUs are used", value=value)
        return online, online
    if not allowed & online:
        # Seen with lxcfs, which renumbers `online` for a container; the affinity is the scheduler's word.
        text = f"no CPU of Cpus_allowed_list ({{items}}) is in {path} ({{value}}): taken as online"
        tree.add_warning(text, *allowed, path=path)
        online = allowed
    return online, allowed & online


def read_isolated(tree: Tree, online: frozenset[int]) -> frozenset[int]:
    """Online CPUs that `isolcpus` sets apart."""
    path = f"{CPU}isolated"
    isolated = tree.read_list(path)
    if isolated is None and tree.read(path) is not None:
        tree.add_warning(f"{path} is {{value}}: no CPU is taken as isolated", path=path)
    return (isolated or frozenset()) & online


def read_allowed_mems(tree: Tree, status: dict[str, str], nodes: frozenset[int]) -> frozenset[int]:
    """The online NUMA nodes whose memory this job may use; all of them if nothing says."""
    value = status.get("Mems_allowed_list")
    allowed = parse_list(value or "") or frozenset()
    if allowed & nodes:
        return allowed & nodes
    tree.add_warning(
        f"Mems_allowed_list of {STATUS} is {{value}}: every NUMA node's memory is used", value=value
    )
    return nodes


def read_cpu_topology(
    tree: Tree, online: frozenset[int], place: dict[int, int]
) -> tuple[tuple[Cpu, ...], tuple[Cache, ...]]:
    """The online CPUs and the last-level caches, each in ascending order; `place` has the NUMA nodes."""
    cores = _read_cores(tree, place)
    firsts = sorted(set(cores.values()))
    packages = {}
    for cpu in firsts:
        path = f"{CPU}cpu{cpu}/topology/physical_package_id"
        package = tree.read_number(path)
        if package is None:  # the firmware gives none: -1 in some ARM guests
            text = "physical_package_id of CPUs {items} is {value}: one package a NUMA node assumed"
            tree.add_warning(text, cpu, path=path)
            package = place[cpu]
        packages[cpu] = package
    above, caches = _read_caches(tree, firsts, place)
    capacities = _read_capacities(tree, firsts)
    cpus = tuple(
        Cpu(cpu, core, packages[core], place[cpu], above[core], capacities.get(core, BIG))
        for cpu in sorted(online)
        for core in (cores[cpu],)
    )
    return cpus, caches


def _group_cpus(
    tree: Tree, what: str, cpus: list[int], read: Callable[[int], frozenset[int] | None]
) -> tuple[dict[int, int], list[int]]:
    """Gather CPUs in the sets that `read` gives: the lowest member for each CPU, and the unreadable ones.

    A set is read once, from its first member; a CPU whose own file is bad is found through its peers'.
    """
    lowest: dict[int, int] = {}
    bad: list[int] = []
    known = frozenset(cpus)
    for cpu in cpus:
        if cpu in lowest:
            continue
        members = read(cpu)
        if members is None or cpu not in members:
            bad.append(cpu)
            continue
        fresh = [member for member in members if member in known and member not in lowest]
        if taken := (members & known).difference(fresh):
            tree.add_warning(f"CPUs {{items}} are in the {what} of several CPUs: the first is taken", *taken)
        lowest.update(dict.fromkeys(fresh, min(fresh)))
    return lowest, [cpu for cpu in bad if cpu not in lowest]


def _read_cores(tree: Tree, place: dict[int, int]) -> dict[int, int]:
    """The lowest online CPU of each CPU's core."""

    def read_siblings(cpu: int) -> frozenset[int] | None:
        """The threads of a CPU's core, under the file's old or new name; a core never spans NUMA nodes."""
        here = f"{CPU}cpu{cpu}/topology/"
        threads = tree.read_list(f"{here}thread_siblings_list") or tree.read_list(f"{here}core_cpus_list")
        far = [other for other in threads or () if place.get(other, place[cpu]) != place[cpu]]
        if far:
            text = "CPUs {items} are on another NUMA node than a sibling thread: taken as of other cores"
            tree.add_warning(text, *far)
        return threads and threads.difference(far)

    cores, bad = _group_cpus(tree, "thread_siblings_list", sorted(place), read_siblings)
    if bad:
        text = "thread_siblings_list of CPUs {items} is {value}: each is taken as a core of its own"
        tree.add_warning(text, *bad, path=f"{CPU}cpu{bad[0]}/topology/thread_siblings_list")
    cores.update((cpu, cpu) for cpu in bad)
    return cores


def _read_caches(
    tree: Tree, firsts: list[int], place: dict[int, int]
) -> tuple[dict[int, int], tuple[Cache, ...]]:
    """The lowest online CPU under the last-level cache of each core, by the core's first CPU, and the caches.

    If it is unknown one cache for each NUMA node is assumed, and not listed.
    """
    tops: dict[int, tuple[int, int]] = {}

    def read_last_cache(cpu: int) -> frozenset[int] | None:
        """The CPUs under the cache of a CPU's highest level, whatever that is."""
        here = f"{CPU}cpu{cpu}/cache"
        indices = tree.list_numbers(here, "index")
        levels = [(tree.read_number(f"{here}/index{index}/level") or 0, index) for index in indices]
        known = [entry for entry in levels if 1 <= entry[0] < 10]
        if not known:
            return None
        tops[cpu] = max(known)
        return tree.read_list(f"{here}/index{tops[cpu][1]}/shared_cpu_list")

    above, bad = _group_cpus(tree, "last-level cache", firsts, read_last_cache)
    caches: dict[int, Cache] = {}
    for cpu, (level, index) in tops.items():
        if cpu not in above or above[cpu] in caches:
            continue
        path = f"{CPU}cpu{cpu}/cache/index{index}/size"
        text = tree.read(path) or ""  # missing in many VMs, and on ARM without PPTT sizes
        number, unit = parse_number(text[:-1]), UNITS.get(text[-1:])
        if text and (number is None or unit is None):
            text = "size of the last-level caches of CPUs {items} is {value}: 0 is shown"
            tree.add_warning(text, cpu, path=path)
        caches[above[cpu]] = Cache(above[cpu], level, (number or 0) * (unit or 0))
    if bad:
        tree.add_warning("last-level cache of CPUs {items} is unknown: one for each NUMA node assumed", *bad)
    shared: dict[int, int] = {}
    above.update((cpu, shared.setdefault(place[cpu], cpu)) for cpu in bad)
    return above, tuple(caches[number] for number in sorted(caches))


def _read_capacities(tree: Tree, firsts: list[int]) -> dict[int, int]:
    """Capacities of cores by their first CPU; empty if the kernel knows one class of cores only."""
    capacities: dict[int, int] = {}
    if tree.read(f"{CPU}cpu{firsts[0]}/cpu_capacity") is not None:
        for cpu in firsts:
            path = f"{CPU}cpu{cpu}/cpu_capacity"
            capacity = tree.read_number(path) or 0
            if 0 < capacity <= BIG:
                capacities[cpu] = capacity
            else:
                text = "cpu_capacity of CPUs {items} is {value}: taken as a big core's"
                tree.add_warning(text, cpu, path=path)
    elif tree.read("sys/devices/cpu_core/cpus") is not None:  # a hybrid x86 machine
        for name, capacity in CLASSES.items():
            path = f"sys/devices/{name}/cpus"
            cpus = tree.read_list(path)
            if cpus is None and tree.read(path) is not None:
                tree.add_warning(f"{path} is {{value}}: its cores are taken as big ones", path=path)
            capacities.update(dict.fromkeys((cpus or frozenset()).intersection(firsts), capacity))
    return capacities


def list_numa_nodes(tree: Tree) -> tuple[int, ...]:
    """Online NUMA nodes in ascending order; none if the kernel does without NUMA."""
    present = tree.list_numbers(NODE, "node")
    online = tree.read_list(f"{NODE}online")
    if not present:
        return ()
    if not online or online.isdisjoint(present):
        text = f"{NODE}online is {{value}}: nodes {{items}} are used"
        tree.add_warning(text, *present, path=f"{NODE}online")
        return tuple(present)
    if lost := online.difference(present):
        tree.add_warning(f"NUMA nodes {{items}} of {NODE}online have no directory: left out", *lost)
    return tuple(node for node in present if node in online)


def place_cpus(tree: Tree, ids: tuple[int, ...], online: frozenset[int]) -> dict[int, int]:
    """The NUMA node of each online CPU; node 0 if the kernel does without NUMA.

    A node's `cpulist` can be stale: `online` and `has_cpu` decide. An empty `has_cpu` says nothing.
    """
    if not ids:
        return dict.fromkeys(online, 0)
    lists = {}
    for node in ids:
        path = f"{NODE}node{node}/cpulist"
        lists[node] = cpus = tree.read_list(path)
        if cpus is None:
            text = "cpulist of NUMA nodes {items} is {value}: taken as without CPUs"
            tree.add_warning(text, node, path=path)
        elif not cpus <= online:
            text = "cpulist of NUMA nodes {items} ({value}) has CPUs that are offline: left out"
            tree.add_warning(text, node, value=format_cpulist(cpus))
    has_cpu = tree.read_list(f"{NODE}has_cpu")
    trusted = [node for node in ids if not has_cpu or node in has_cpu]
    place: dict[int, int] = {}
    for node in (*trusted, *(node for node in ids if node not in trusted)):
        cpus = (lists[node] or frozenset()) & online
        if taken := cpus & place.keys():
            tree.add_warning("CPUs {items} are in the cpulist of several NUMA nodes: one is taken", *taken)
        if cpus and node not in trusted:
            text = f"NUMA nodes {{items}} have a cpulist but are not in {NODE}has_cpu: used last"
            tree.add_warning(text, node)
        place.update(dict.fromkeys(cpus - place.keys(), node))
    if strays := online - place.keys():
        # The only node with CPUs but no readable list has them, else the lowest.
        candidates = trusted or list(ids)
        silent = [node for node in candidates if lists[node] is None]
        chosen = silent[0] if len(silent) == 1 else candidates[0]
        tree.add_warning(f"CPUs {{items}} are in no NUMA node's cpulist: taken as node {chosen}'s", *strays)
        place.update(dict.fromkeys(strays, chosen))
    return place


def read_numa_nodes(
    tree: Tree, ids: tuple[int, ...], place: dict[int, int], memory_kib: int
) -> tuple[NumaNode, ...]:
    """The online NUMA nodes; if the kernel has no NUMA support, one that has everything.

    Memory may be bound if it is the kernel's normal memory, or next to CPUs (a kernel that was started with
    `movable_node` lists no node that was plugged in as normal), and not a GPU's.
    """
    if not ids:
        return (NumaNode(0, memory_kib, True, ((0, LOCAL),)),)
    sizes = {}
    for node in ids:
        path = f"{NODE}node{node}/meminfo"
        sizes[node] = tree.read_meminfo(path).get("MemTotal")
        if sizes[node] is None:
            text = "meminfo of NUMA nodes {items} is {value}: memory size unknown, 0 is shown"
            tree.add_warning(text, node, path=path)
    path = f"{NODE}has_normal_memory"
    normal = tree.read_list(path)
    if not normal:
        tree.add_warning(f"{path} is {{value}}: only memory of nodes with CPUs is bound", path=path)
    beside = {node for node in place.values() if sizes[node] != 0}
    bound = ((normal or frozenset()) | beside) - read_gpu_memory_nodes(tree)
    order = sorted(tree.read_list(f"{NODE}online") or ids)
    return tuple(
        NumaNode(node, sizes[node] or 0, node in bound, _read_distances(tree, node, ids, order))
        for node in ids
    )


def _read_distances(
    tree: Tree, node: int, ids: tuple[int, ...], order: list[int]
) -> tuple[tuple[int, int], ...]:
    """SLIT distances from a node, one for each online node; the kernel's defaults if they are invalid.

    Valid is what the kernel takes from firmware: 10 to itself, more to others (slit_valid in srat.c).
    """
    path = f"{NODE}node{node}/distance"
    values = [parse_number(word) or 0 for word in (tree.read(path) or "").split()]
    table = dict(zip(order, values, strict=False))
    if len(values) == len(order) and all(
        value == LOCAL if other == node else LOCAL < value < 256 for other, value in table.items()
    ):
        return tuple((other, table[other]) for other in ids)
    tree.add_warning("distance of NUMA nodes {items} is {value}: 10 and 20 are assumed", node, path=path)
    return tuple((other, LOCAL if other == node else REMOTE) for other in ids)
