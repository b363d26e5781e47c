"""How capable each core is, on machines with several classes of cores."""

from launcher.probe.allowed_cpus import CPU
from launcher.probe.sysfs import Tree

CLASSES = {"cpu_atom": 616, "cpu_lowpower": 405}
"""Directories in sys/devices that name a hybrid x86 machine's lesser cores, and the capacity they get.

Most x86 kernels have no `cpu_capacity`; these are orders of magnitude, to tell classes apart. An
efficiency core does 0.787 of a performance core's work at the same clock (HYBRID_SCALING_FACTOR_ADL of
intel_pstate: 78741 to 100000), and a Core i9-12900K's clocks are 3.9 and 5.1 GHz: 1024 x 0.602. The
low-power ones of a Core Ultra 7 155H have 2.5 GHz for its efficiency cores' 3.8.
"""


def read_capacities(tree: Tree, firsts: list[int]) -> dict[int, int]:
    """`cpu_capacity` of each core by its first CPU; empty where the kernel knows one class of cores only."""
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
