"""How many cores each rank has, and what a CPU quota leaves of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.plan.model import Machine
from launcher.plan.policies import Placement
from launcher.plan.usable_cores import Topology, find_usable


@dataclass(frozen=True, slots=True)
class Cores:
    """Physical cores that a rank has, a shared one counted in part."""

    own: float
    """For its own process."""
    spare: float
    """For its DataLoader workers alone."""
    cpus: float = 0
    """Hardware threads of its own process."""
    limited: bool = False
    """A cgroup's quota leaves it less time than the cores would have."""


def count_cores(topology: Topology, places: Sequence[Placement]) -> tuple[Cores, ...]:
    """Cores of each rank; one that n ranks share counts 1/n for each."""
    masks = {mask for place in places for mask in (place.cpus, place.worker_cpus)}
    cores = {mask: frozenset(topology.core_of[pu] for pu in mask) for mask in masks}
    own, spare, users = Counter[int](), Counter[int](), Counter[int]()
    extra = [cores[place.worker_cpus] - cores[place.cpus] for place in places]
    for place, more in zip(places, extra, strict=True):
        own.update(cores[place.cpus])
        spare.update(more)
        users.update(place.cpus)
    return tuple(
        Cores(
            own=sum(1 / own[core] for core in cores[place.cpus]),
            spare=sum(1 / spare[core] for core in more),
            cpus=sum(1 / users[pu] for pu in place.cpus),
        )
        for place, more in zip(places, extra, strict=True)
    )


def count_usable(machine: Machine) -> int:
    """Cores that the job may use, those kept back for the system and those of no rank among them."""
    usable = find_usable(machine)
    return len({cpu.core for cpu in machine.cpus if cpu.id in usable})


def limit_cores(cores: Sequence[Cores], quota: float | None) -> tuple[Cores, ...]:
    """What each rank has of its cores within its even share of a cgroup's CPU quota.

    A quota counts time on hardware threads, of which a core needs one to be busy.
    """
    if quota is None:
        return tuple(cores)
    share = quota / len(cores)
    return tuple(
        Cores(
            own=min(have.own, share),
            spare=max(0, min(have.spare, share - have.own)),
            cpus=min(have.cpus, share),
            limited=share < have.own + have.spare,
        )
        for have in cores
    )
