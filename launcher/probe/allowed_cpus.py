"""Which CPUs are online, and which CPUs and memory nodes this job may use of them."""

from launcher.errors import MachineError
from launcher.probe.cgroups import read_cpuset
from launcher.probe.sysfs import Tree, parse_list, quote_content

CPU = "sys/devices/system/cpu/"
STATUS = "proc/self/status"


def read_cpu_sets(tree: Tree, status: dict[str, str]) -> tuple[frozenset[int], frozenset[int]]:
    """The online CPUs and the allowed ones among them; neither is empty.

    Raises MachineError where nothing names a CPU.
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
    """The online CPUs where `online` does not say: offline ones have no topology directory.

    Kernels before 2.6.26 have none of the lists, only the CPUs' directories.
    """
    known = (
        allowed
        or tree.read_list(f"{CPU}present")
        or tree.read_list(f"{CPU}possible")
        or frozenset(tree.list_numbers(CPU, "cpu"))
    )
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
    """Online CPUs that `isolcpus` sets apart; kernels before 4.2 don't tell."""
    path = f"{CPU}isolated"
    isolated = tree.read_list(path)
    if isolated is None and tree.read(path) is not None:
        tree.add_warning(f"{path} is {{value}}: no CPU is taken as isolated", path=path)
    return (isolated or frozenset()) & online


def read_allowed_mems(tree: Tree, status: dict[str, str], nodes: frozenset[int]) -> frozenset[int]:
    """The online NUMA nodes whose memory this job may use; all of them where nothing says."""
    value = status.get("Mems_allowed_list")
    allowed = parse_list(value or "") or read_cpuset(tree, "mems") or frozenset()
    if allowed & nodes:
        return allowed & nodes
    tree.add_warning(
        f"Mems_allowed_list of {STATUS} is {{value}}: every NUMA node's memory is used", value=value
    )
    return nodes
