"""NUMA nodes: their CPUs, memory and distances."""

from launcher.cpulist import format_cpulist
from launcher.plan.model import NumaNode
from launcher.probe.nvidia_gpus import read_gpu_memory_nodes
from launcher.probe.sysfs import Tree

NODE = "sys/devices/system/node/"
LOCAL, REMOTE = 10, 20
"""The kernel's distances if the firmware gives none (include/linux/topology.h)."""


def list_numa_nodes(tree: Tree) -> tuple[int, ...]:
    """Online NUMA nodes in ascending order; none if the kernel does without NUMA."""
    present = tree.list_numbers(NODE, "node")
    online = tree.read_list(f"{NODE}online")
    if not present:
        return ()
    if not online or online.isdisjoint(present):
        tree.add_warning(
            f"{NODE}online is {{value}}: nodes {{items}} are used", *present, path=f"{NODE}online"
        )
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
    lists = {node: read_node_cpus(tree, node, online) for node in ids}
    has_cpu = tree.read_list(f"{NODE}has_cpu")
    trusted = [node for node in ids if not has_cpu or node in has_cpu]
    place: dict[int, int] = {}
    for node in (*trusted, *(node for node in ids if node not in trusted)):
        cpus = lists[node] or frozenset()
        if taken := cpus & place.keys():
            tree.add_warning("CPUs {items} are in the cpulist of several NUMA nodes: one is taken", *taken)
        if cpus and node not in trusted:
            tree.add_warning(
                f"NUMA nodes {{items}} have a cpulist but are not in {NODE}has_cpu: used last", node
            )
        place.update(dict.fromkeys(cpus - place.keys(), node))
    if homeless := online - place.keys():
        place.update(
            dict.fromkeys(homeless, choose_node_of_strays(tree, trusted or list(ids), lists, homeless))
        )
    return place


def read_node_cpus(tree: Tree, node: int, online: frozenset[int]) -> frozenset[int] | None:
    """The online CPUs of a node's cpulist; None if it cannot be read."""
    path = f"{NODE}node{node}/cpulist"
    cpus = tree.read_list(path)
    if cpus is None:
        tree.add_warning("cpulist of NUMA nodes {items} is {value}: taken as without CPUs", node, path=path)
        return None
    if not cpus <= online:
        text = "cpulist of NUMA nodes {items} ({value}) has CPUs that are offline: left out"
        tree.add_warning(text, node, value=format_cpulist(cpus))
    return cpus & online


def choose_node_of_strays(
    tree: Tree, ids: list[int], lists: dict[int, frozenset[int] | None], homeless: frozenset[int]
) -> int:
    """The node for CPUs that no cpulist has: the only one with CPUs but no readable list, else the lowest."""
    silent = [node for node in ids if lists[node] is None]
    chosen = silent[0] if len(silent) == 1 else ids[0]
    tree.add_warning(f"CPUs {{items}} are in no NUMA node's cpulist: taken as node {chosen}'s", *homeless)
    return chosen


def read_numa_nodes(
    tree: Tree, ids: tuple[int, ...], place: dict[int, int], memory_kib: int
) -> tuple[NumaNode, ...]:
    """The online NUMA nodes; if the kernel has no NUMA support, one that has everything."""
    if not ids:
        return (NumaNode(0, memory_kib, True, ((0, LOCAL),)),)
    sizes = {node: read_node_memory(tree, node) for node in ids}
    normal = find_normal(tree, sizes, frozenset(place.values()))
    order = sorted(tree.read_list(f"{NODE}online") or ids)
    return tuple(
        NumaNode(node, sizes[node] or 0, node in normal, read_distances(tree, node, ids, order))
        for node in ids
    )


def read_node_memory(tree: Tree, node: int) -> int | None:
    """MemTotal of a node in KiB; None if it is unknown."""
    path = f"{NODE}node{node}/meminfo"
    kib = tree.read_mem_total(path)
    if kib is None:
        tree.add_warning(
            "meminfo of NUMA nodes {items} is {value}: memory size unknown, 0 is shown", node, path=path
        )
    return kib


def find_normal(tree: Tree, sizes: dict[int, int | None], with_cpus: frozenset[int]) -> frozenset[int]:
    """Nodes whose memory may be bound: the kernel's normal memory, and any next to CPUs, but no GPU's.

    A kernel that was started with `movable_node` lists no node that was plugged in as normal.
    """
    gpu_nodes = read_gpu_memory_nodes(tree)
    path = f"{NODE}has_normal_memory"
    normal = tree.read_list(path)
    if not normal:
        tree.add_warning(f"{path} is {{value}}: only memory of nodes with CPUs is bound", path=path)
    beside = with_cpus & frozenset(node for node, kib in sizes.items() if kib != 0)
    return ((normal or frozenset()) | beside) - gpu_nodes


def read_distances(
    tree: Tree, node: int, ids: tuple[int, ...], order: list[int]
) -> tuple[tuple[int, int], ...]:
    """SLIT distances from a node, one for each online node; the kernel's defaults if they are invalid.

    Valid is what the kernel takes from firmware: 10 to itself, more to others (slit_valid in srat.c).
    """
    path = f"{NODE}node{node}/distance"
    words = (tree.read(path) or "").split()
    values = [int(word) if word.isdecimal() and len(word) < 4 else 0 for word in words]
    table = dict(zip(order, values, strict=False))
    if len(values) == len(order) and all(
        value == LOCAL if other == node else LOCAL < value < 256 for other, value in table.items()
    ):
        return tuple((other, table[other]) for other in ids)
    tree.add_warning("distance of NUMA nodes {items} is {value}: 10 and 20 are assumed", node, path=path)
    return tuple((other, LOCAL if other == node else REMOTE) for other in ids)
