"""RDMA devices (InfiniBand, RoCE, EFA) with their place and ports."""

import re

from launcher.plan.model import Nic
from launcher.probe.sysfs import Tree, find_node, parse_number, split_path

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` costs each start of a rank some milliseconds
    from launcher.doctor.model import NicFacts

NICS = "sys/class/infiniband/"
STATE = re.compile(r"([0-5]):.*", re.DOTALL)
"""A port's `state`, as `4: ACTIVE`; the number is ib_port_state of include/rdma/ib_verbs.h."""
ACTIVE = "4"
STATE_WORD = re.compile(r"[A-Za-z_]{1,20}")
RATE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) Gb/sec.*", re.DOTALL)
"""A port's `rate`, as `400 Gb/sec (4X NDR)`."""
NAME_PARTS = re.compile(r"([0-9]+)|([^0-9]+)")
LAYERS = ("InfiniBand", "Ethernet")
"""What `link_layer` may say; EFA has another of its own."""


def _list_names(tree: Tree) -> list[str]:
    """The devices in natural order: mlx5_2 before mlx5_10."""
    names = []
    for name in tree.list_directory(NICS):
        if name.isascii() and name.isprintable():
            names.append(name)
        else:
            tree.add_warning(f"{NICS} has {{value}}, which is no device's name: left out", value=name)

    def split_numbers(name: str) -> list[tuple[bool, int, str]]:
        return [(bool(digits), int(digits or 0), text) for digits, text in NAME_PARTS.findall(name)]

    return sorted(names, key=split_numbers)


def read_nics(tree: Tree, nodes: frozenset[int]) -> tuple[Nic, ...]:
    """The RDMA devices; one that is no PCI device, such as soft RoCE, has no place."""
    return tuple(_read_nic(tree, name, nodes) for name in _list_names(tree))


def _read_nic(tree: Tree, name: str, nodes: frozenset[int]) -> Nic:
    here = f"{NICS}{name}/"
    real = tree.resolve_links(f"{here}device")
    if real is None:
        text = "sysfs links of RDMA devices {items} lead out of the root: their place is unknown"
        tree.add_warning(text, name)
        return Nic(name, "", None)
    path, node = split_path(real), None
    if path:
        numa_node = tree.read(f"{here}device/numa_node")
        if numa_node is None and not tree.has(f"{here}device"):
            text = "the PCI devices of the RDMA devices {items} are not in sysfs: NUMA node unknown"
            tree.add_warning(text, name)
        node = find_node(tree, "RDMA devices", name, numa_node, nodes)
    ports = []
    for number in tree.list_numbers(f"{here}ports", ""):
        port = f"{here}ports/{number}/"
        active = _read_active(tree, name, f"{port}state")
        layer = tree.read(f"{port}link_layer") or ""
        ports.append((active, _read_rate(tree, name, f"{port}rate"), layer if layer in LAYERS else ""))
    # The fastest of the active ports, else of all.
    active, rate, layer = max(ports, key=lambda port: port[:2], default=(True, 0.0, ""))
    return Nic(name, path[-1] if path else "", node, path[:-1], layer, rate, active)


def _read_active(tree: Tree, name: str, path: str) -> bool:
    """Whether a port is active; true if it is unknown."""
    text = tree.read(path)
    found = STATE.fullmatch(f"{text}:")
    if found:
        return found[1] == ACTIVE
    if text is not None:
        tree.add_warning("port state of RDMA devices {items} is {value}: taken as active", name, value=text)
    return True


def _read_rate(tree: Tree, name: str, path: str) -> float:
    """A port's rate in Gb/s; 0 if it is unknown."""
    text = tree.read(path)
    if found := RATE.fullmatch(text or ""):
        return float(found[1])
    if text is not None:
        tree.add_warning("port rate of RDMA devices {items} is {value}: unknown", name, value=text)
    return 0.0


def read_nic_ports(tree: Tree) -> "tuple[NicFacts, ...]":
    """Every port of every device: state, rate, and how often the link has gone down."""
    from launcher.doctor.model import NicFacts  # plans do without the doctor

    ports = []
    for name in _list_names(tree):
        for number in tree.list_numbers(f"{NICS}{name}/ports", ""):
            here = f"{NICS}{name}/ports/{number}/"
            word = (tree.read(f"{here}state") or "").rpartition(":")[2].strip()
            ports.append(
                NicFacts(
                    name=f"{name}:{number}",
                    state=word if STATE_WORD.fullmatch(word) else "",
                    rate_gbps=_read_rate(tree, name, f"{here}rate"),
                    link_downed=parse_number(tree.read(f"{here}counters/link_downed")),
                )
            )
    return tuple(ports)
