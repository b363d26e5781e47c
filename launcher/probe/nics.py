"""RDMA devices (InfiniBand, RoCE, EFA) with their place and ports."""

from itertools import groupby

from launcher.plan.model import Nic
from launcher.probe.pci import find_node, split_path
from launcher.probe.sysfs import Tree

NICS = "sys/class/infiniband/"
ACTIVE = 4
"""IB_PORT_ACTIVE (include/rdma/ib_verbs.h)."""
LAYERS = ("InfiniBand", "Ethernet")
"""What `link_layer` may say; EFA has another of its own."""


def read_nics(tree: Tree, nodes: frozenset[int]) -> tuple[Nic, ...]:
    """The RDMA devices in natural order: mlx5_2 before mlx5_10."""
    names = []
    for name in tree.list_directory(NICS):
        if name.isascii() and name.isprintable():
            names.append(name)
        else:
            tree.add_warning(f"{NICS} has {{value}}, which is no device's name: left out", value=name)
    return tuple(read_nic(tree, name, nodes) for name in sorted(names, key=split_numbers))


def split_numbers(name: str) -> list[tuple[bool, int, str]]:
    """A name's parts, each number in it as a number: a key for sorting."""
    runs = [("".join(run), digits) for digits, run in groupby(name, str.isdigit)]
    return [(True, int(text), "") if digits else (False, 0, text) for text, digits in runs]


def read_nic(tree: Tree, name: str, nodes: frozenset[int]) -> Nic:
    """One device; one that is no PCI device, such as soft RoCE, has no place."""
    here = f"{NICS}{name}/"
    real = tree.resolve_links(f"{here}device")
    if real is None:
        tree.add_warning(
            "sysfs links of RDMA devices {items} lead out of the root: their place is unknown", name
        )
        return Nic(name, "", None)
    path = split_path(real)
    node = None
    if path:
        text = tree.read(f"{here}device/numa_node")
        if text is None and not tree.has(f"{here}device"):
            tree.add_warning(
                "the PCI devices of the RDMA devices {items} are not in sysfs: NUMA node unknown", name
            )
        node = find_node(tree, "RDMA devices", name, text, nodes)
    active, rate, layer = read_ports(tree, name)
    return Nic(name, path[-1] if path else "", node, path[:-1], layer, rate, active)


def read_ports(tree: Tree, name: str) -> tuple[bool, float, str]:
    """Whether a port is active, and rate and link layer of the fastest of the active ones, else of all."""
    ports = []
    for number in tree.list_numbers(f"{NICS}{name}/ports", ""):
        here = f"{NICS}{name}/ports/{number}/"
        active = read_active(tree, name, f"{here}state")
        layer = tree.read(f"{here}link_layer") or ""
        ports.append((active, read_rate(tree, name, f"{here}rate"), layer if layer in LAYERS else ""))
    return max(ports, key=lambda port: port[:2], default=(True, 0.0, ""))


def read_active(tree: Tree, name: str, path: str) -> bool:
    """Whether a port's `state` (`4: ACTIVE`) is active; true if it is unknown."""
    text = tree.read(path)
    number = (text or "").partition(":")[0]
    if number in ("0", "1", "2", "3", "4", "5"):
        return int(number) == ACTIVE
    if text is not None:
        tree.add_warning("port state of RDMA devices {items} is {value}: taken as active", name, value=text)
    return True


def read_rate(tree: Tree, name: str, path: str) -> float:
    """A port's `rate` (`400 Gb/sec (4X NDR)`) in Gb/s; 0 if it is unknown."""
    text = tree.read(path)
    number, _, unit = (text or "").partition(" ")
    digits = number.replace(".", "", 1)
    if unit.startswith("Gb/sec") and digits.isascii() and digits.isdecimal() and len(digits) < 10:
        return float(number)
    if text is not None:
        tree.add_warning("port rate of RDMA devices {items} is {value}: unknown", name, value=text)
    return 0.0
