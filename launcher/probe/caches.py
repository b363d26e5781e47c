"""The last-level caches, and which CPUs are together under one."""

from collections.abc import Callable

from launcher.plan.model import Cache
from launcher.probe.allowed_cpus import CPU
from launcher.probe.sysfs import Tree

UNITS = {"K": 1, "M": 1 << 10, "G": 1 << 20}
"""KiB in the units of a cache's `size`; the kernel itself writes K."""


def group_cpus(
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


def read_caches(
    tree: Tree, firsts: list[int], place: dict[int, int]
) -> tuple[dict[int, int], tuple[Cache, ...]]:
    """The lowest online CPU under the last-level cache of each core, by the core's first CPU, and the caches.

    Where it is unknown one cache for each NUMA node is assumed, and not listed.
    """
    tops: dict[int, tuple[int, int]] = {}
    above, bad = group_cpus(tree, "last-level cache", firsts, lambda cpu: read_last_cache(tree, cpu, tops))
    caches: dict[int, Cache] = {}
    for cpu, (level, index) in tops.items():
        if cpu in above and above[cpu] not in caches:
            caches[above[cpu]] = Cache(above[cpu], level, read_cache_size(tree, cpu, index))
    if bad:
        tree.add_warning("last-level cache of CPUs {items} is unknown: one for each NUMA node assumed", *bad)
    shared: dict[int, int] = {}
    above.update((cpu, shared.setdefault(place[cpu], cpu)) for cpu in bad)
    return above, tuple(caches[number] for number in sorted(caches))


def read_last_cache(tree: Tree, cpu: int, tops: dict[int, tuple[int, int]]) -> frozenset[int] | None:
    """The CPUs under the cache of a CPU's highest level, whatever that is; `tops` takes level and index."""
    here = f"{CPU}cpu{cpu}/cache/index"
    levels = [
        (level, index)
        for index in tree.list_numbers(f"{CPU}cpu{cpu}/cache", "index")
        if 1 <= (level := tree.read_int(f"{here}{index}/level") or 0) < 10
    ]
    if not levels:
        return None
    tops[cpu] = max(levels)
    return tree.read_list(f"{here}{tops[cpu][1]}/shared_cpu_list")


def read_cache_size(tree: Tree, cpu: int, index: int) -> int:
    """A cache's size in KiB; 0 where it is unknown, as in many VMs and on ARM without PPTT sizes."""
    path = f"{CPU}cpu{cpu}/cache/index{index}/size"
    text = tree.read(path)
    if not text:
        return 0
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1] in UNITS else (text, 0)
    if not (unit and number.isascii() and number.isdecimal() and len(number) < 10):
        tree.add_warning(
            "size of the last-level caches of CPUs {items} is {value}: 0 is shown", cpu, path=path
        )
        return 0
    return int(number) * unit
