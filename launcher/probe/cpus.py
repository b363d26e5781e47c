"""The online CPUs with cores, packages, last-level caches and capacities, and which this job may use."""

from collections.abc import Callable

from launcher.errors import MachineError
from launcher.plan.model import Cache, Cpu
from launcher.probe.cgroups import read_cpuset
from launcher.probe.sysfs import Tree, parse_list, quote_content

CPU = "sys/devices/system/cpu/"
STATUS = "proc/self/status"
UNITS = {"K": 1, "M": 1 << 10, "G": 1 << 20}
"""KiB in the units of a cache's `size`; the kernel itself writes K."""
CLASSES = {"cpu_atom": 616, "cpu_lowpower": 405}
"""Directories in sys/devices that name a hybrid x86 machine's lesser cores, and the capacity they get.

Most x86 kernels have no `cpu_capacity`; these are orders of magnitude, to tell classes apart. An
efficiency core does 0.787 of a performance core's work at the same clock (HYBRID_SCALING_FACTOR_ADL of
intel_pstate: 78741 to 100000), and a Core i9-12900K's clocks are 3.9 and 5.1 GHz: 1024 x 0.602. The
low-power ones of a Core Ultra 7 155H have 2.5 GHz for its efficiency cores' 3.8.
"""


def read_cpu_sets(tree: Tree, status: dict[str, str]) -> tuple[frozenset[int], frozenset[int]]:
    """The online CPUs and the allowed ones among them; neither is empty.

    Raises MachineError if nothing names a CPU.
    """
    online = tree.read_list(f"{CPU}online")
    allowed = parse_list(status.get("Cpus_allowed_list", "")) or read_cpuset(tree, "cpus")
    if not online:
        online = guess_online(tree, allowed)
    if not online:
        raise MachineError(explain_none(tree, status))
    if not allowed:
        value = status.get("Cpus_allowed_list")
        tree.add_warning(f"Cpus_allowed_list of {STATUS} is {{value}}: all online CPUs are used", value=value)
        allowed = online
    if not allowed & online:
        # Seen with lxcfs, which renumbers `online` for a container; the affinity is the scheduler's word.
        source = "Cpus_allowed_list" if "Cpus_allowed_list" in status else "the cpuset"
        text = f"no CPU of {source} ({{items}}) is in {CPU}online ({{value}}): taken as online"
        tree.add_warning(text, *allowed, path=f"{CPU}online")
        online = allowed
    return online, allowed & online


def guess_online(tree: Tree, allowed: frozenset[int] | None) -> frozenset[int]:
    """The online CPUs if `online` does not say: offline ones have no topology directory."""
    known = allowed or tree.read_list(f"{CPU}present") or frozenset(tree.list_numbers(CPU, "cpu"))
    shown = frozenset(cpu for cpu in known if tree.list_directory(f"{CPU}cpu{cpu}/topology"))
    online = shown or known
    if online:
        tree.add_warning(f"{CPU}online is {{value}}: CPUs {{items}} are used", *online, path=f"{CPU}online")
    return online


def explain_none(tree: Tree, status: dict[str, str]) -> str:
    """Say that no CPU was found, and how to mend it."""
    return (
        f"no usable CPU below {tree.prefix or '/'}: {CPU}online is "
        f"{quote_content(tree.read(f'{CPU}online'))} and "
        f"Cpus_allowed_list of {STATUS} is {quote_content(status.get('Cpus_allowed_list'))}: "
        "give machine.root a directory that holds sys/ and proc/ as Linux has them"
    )


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
    allowed = parse_list(value or "") or read_cpuset(tree, "mems") or frozenset()
    if allowed & nodes:
        return allowed & nodes
    tree.add_warning(
        f"Mems_allowed_list of {STATUS} is {{value}}: every NUMA node's memory is used", value=value
    )
    return nodes


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

    If it is unknown one cache for each NUMA node is assumed, and not listed.
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
    """A cache's size in KiB; 0 if it is unknown, as in many VMs and on ARM without PPTT sizes."""
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


def read_capacities(tree: Tree, firsts: list[int]) -> dict[int, int]:
    """`cpu_capacity` of each core by its first CPU; empty if the kernel knows one class of cores only."""
    if tree.read(f"{CPU}cpu{firsts[0]}/cpu_capacity") is None:
        return read_classes(tree, firsts)
    capacities = {}
    for cpu in firsts:
        path = f"{CPU}cpu{cpu}/cpu_capacity"
        capacity = tree.read_int(path) or 0
        if 0 < capacity <= 1024:
            capacities[cpu] = capacity
        else:
            tree.add_warning("cpu_capacity of CPUs {items} is {value}: taken as a big core's", cpu, path=path)
    return capacities


def read_classes(tree: Tree, firsts: list[int]) -> dict[int, int]:
    """Assumed capacities of the lesser cores of a hybrid x86 machine, which `cpu_core` is the sign of."""
    if tree.read("sys/devices/cpu_core/cpus") is None:
        return {}
    capacities: dict[int, int] = {}
    for name, capacity in CLASSES.items():
        path = f"sys/devices/{name}/cpus"
        cpus = tree.read_list(path)
        if cpus is None and tree.read(path) is not None:
            tree.add_warning(f"{path} is {{value}}: its cores are taken as big ones", path=path)
        capacities.update(dict.fromkeys((cpus or frozenset()).intersection(firsts), capacity))
    return capacities


def read_cpu_topology(
    tree: Tree, online: frozenset[int], place: dict[int, int]
) -> tuple[tuple[Cpu, ...], tuple[Cache, ...]]:
    """The online CPUs and the last-level caches, each in ascending order; `place` has the NUMA nodes."""
    cores = read_cores(tree, place)
    firsts = sorted(set(cores.values()))
    packages = {first: read_package(tree, first, place[first]) for first in firsts}
    above, caches = read_caches(tree, firsts, place)
    capacities = read_capacities(tree, firsts)
    cpus = (
        Cpu(cpu, core, packages[core], place[cpu], above[core], capacities.get(core, 1024))
        for cpu in sorted(online)
        for core in (cores[cpu],)
    )
    return tuple(cpus), caches


def read_cores(tree: Tree, place: dict[int, int]) -> dict[int, int]:
    """The lowest online CPU of each CPU's core."""
    cores, bad = group_cpus(
        tree, "thread_siblings_list", sorted(place), lambda cpu: read_siblings(tree, cpu, place)
    )
    if bad:
        text = "thread_siblings_list of CPUs {items} is {value}: each is taken as a core of its own"
        tree.add_warning(text, *bad, path=f"{CPU}cpu{bad[0]}/topology/thread_siblings_list")
    cores.update((cpu, cpu) for cpu in bad)
    return cores


def read_siblings(tree: Tree, cpu: int, place: dict[int, int]) -> frozenset[int] | None:
    """The threads of a CPU's core, under the file's old or new name; a core never spans NUMA nodes."""
    here = f"{CPU}cpu{cpu}/topology/"
    threads = tree.read_list(f"{here}thread_siblings_list") or tree.read_list(f"{here}core_cpus_list")
    far = [other for other in threads or () if place.get(other, place[cpu]) != place[cpu]]
    if far:
        tree.add_warning(
            "CPUs {items} are on another NUMA node than a sibling thread: taken as of other cores", *far
        )
    return threads and threads.difference(far)


def read_package(tree: Tree, cpu: int, node: int) -> int:
    """Physical package of a CPU; its NUMA node if the firmware gives none (-1 in some ARM guests)."""
    path = f"{CPU}cpu{cpu}/topology/physical_package_id"
    package = tree.read_int(path)
    if package is not None and package >= 0:
        return package
    tree.add_warning(
        "physical_package_id of CPUs {items} is {value}: one package a NUMA node assumed", cpu, path=path
    )
    return node
