"""The ports of RDMA devices: state, rate, and how often the link has gone down."""

from launcher.doctor.model import NicFacts
from launcher.probe.nics import NICS, read_rate, split_numbers
from launcher.probe.sysfs import Tree, parse_unsigned


def read_nic_ports(tree: Tree) -> tuple[NicFacts, ...]:
    """Every port of every device, in natural order; devices without ports are left out."""
    devices = [name for name in tree.list_directory(NICS) if name.isascii() and name.isprintable()]
    return tuple(
        read_nic_port(tree, name, number)
        for name in sorted(devices, key=split_numbers)
        for number in tree.list_numbers(f"{NICS}{name}/ports", "")
    )


def read_nic_port(tree: Tree, name: str, number: int) -> NicFacts:
    """One port; `state` is as `4: ACTIVE`, of which the word is kept."""
    here = f"{NICS}{name}/ports/{number}/"
    word = (tree.read(f"{here}state") or "").rpartition(":")[2].strip()
    known = word.replace("_", "").isalpha() and word.isascii() and len(word) <= 20
    return NicFacts(
        name=f"{name}:{number}",
        state=word if known else "",
        rate_gbps=read_rate(tree, name, f"{here}rate"),
        link_downed=parse_unsigned(tree.read(f"{here}counters/link_downed")),
    )
