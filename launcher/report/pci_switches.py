"""GPUs and NICs grouped by the PCI switch that they share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.plan.model import Gpu, Nic

Device = Gpu | Nic


@dataclass(frozen=True, slots=True)
class Switch:
    """A PCI switch with at least two cards below it."""

    pci: str
    """Address of the last bridge that they have in common."""
    members: tuple["Device | Switch", ...]


def group_devices(devices: Iterable[Device], depth: int = 2) -> tuple[Device | Switch, ...]:
    """Group devices by their path's first `depth` entries, the host bridge and the bridges after it.

    What shares the first bridge below the host bridge, a root port with one link, is behind one switch.
    Devices of unknown path stand alone, as do the functions of one card.
    """
    groups: dict[tuple[str, ...], list[Device]] = {}
    for at, device in enumerate(devices):
        known = len(device.path) >= depth
        groups.setdefault(device.path[:depth] if known else ("", str(at)), []).append(device)
    found: list[Device | Switch] = []
    for members in groups.values():
        found += close_group(members, depth)
    return tuple(found)


def close_group(members: Sequence[Device], depth: int) -> Sequence[Device | Switch]:
    """Make a switch of devices that share `depth` entries, unless they are one card."""
    if len({device.pci.partition(".")[0] for device in members}) < 2:
        return members
    shared = depth
    while all(len(d.path) > shared and d.path[shared] == members[0].path[shared] for d in members):
        shared += 1
    return [Switch(members[0].path[shared - 1], group_devices(members, shared + 1))]
