"""Which rank has what of a machine, for drawing it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from launcher.cpulist import format_cpulist
from launcher.plan.model import Gpu, Nic, Plan
from launcher.report.palette import find_colour, lighten

LONGEST = 5
"""Characters of a list of ranks that a core has room for."""


@dataclass(frozen=True, slots=True)
class DrawStyle:
    """How a thing is drawn: colours, label, hatching."""

    fills: tuple[str, ...] = ("#ffffff",)
    label: str = ""
    hatched: bool = False


FREE = DrawStyle()
"""No rank's."""
FORBIDDEN = DrawStyle(("#e8e8e8",), hatched=True)
"""Outside the job's cpuset."""
ISOLATED = DrawStyle(("#c8c8c8",), "iso")
"""Set apart at boot, and left alone."""


@dataclass(frozen=True, slots=True)
class RankStyles:
    """Ranks by what they have."""

    plan: Plan
    owners: Mapping[int, tuple[int, ...]]
    """By PU, the ranks whose own process runs there."""
    workers: Mapping[int, tuple[int, ...]]
    """By PU, the ranks that have nothing but DataLoader workers there."""

    def find_style(self, pus: Collection[int]) -> DrawStyle:
        """How a PU is drawn, or the label of a core's PUs."""
        machine = self.plan.machine
        owners = {rank for pu in pus for rank in self.owners.get(pu, ())}
        workers = {rank for pu in pus for rank in self.workers.get(pu, ())}
        if owners:
            return DrawStyle(pick_colours(owners), name_ranks("R", owners))
        if workers:
            return DrawStyle(tuple(map(lighten, pick_colours(workers))), name_ranks("w", workers))
        if not machine.allowed_cpus.intersection(pus):
            return FORBIDDEN
        return ISOLATED if machine.isolated.issuperset(pus) else FREE

    def find_device(self, device: Gpu | Nic) -> tuple[int, ...]:
        """The ranks that use a device."""
        if isinstance(device, Gpu):
            return tuple(r.local_rank for r in self.plan.ranks if r.gpu and r.gpu.pci == device.pci)
        return tuple(rank.local_rank for rank in self.plan.ranks if rank.nic == device.name)

    def find_memory(self, node: int) -> tuple[int, ...]:
        """The ranks whose memory is on a NUMA node."""
        return tuple(rank.local_rank for rank in self.plan.ranks if node in rank.memory.nodes)


def gather_rank_styles(plan: Plan) -> RankStyles:
    """Find out who has what."""
    owners: dict[int, tuple[int, ...]] = {}
    workers: dict[int, tuple[int, ...]] = {}
    for rank in plan.ranks:
        for pu in rank.cpus:
            owners[pu] = (*owners.get(pu, ()), rank.local_rank)
        for pu in rank.worker_cpus - rank.cpus:
            workers[pu] = (*workers.get(pu, ()), rank.local_rank)
    return RankStyles(plan, owners, workers)


def pick_colours(ranks: Collection[int]) -> tuple[str, ...]:
    """The colours of some ranks, each once."""
    return tuple(dict.fromkeys(map(find_colour, sorted(ranks))))


def name_ranks(letter: str, ranks: Collection[int]) -> str:
    """A short name for some ranks: `R0`, `w2-5`; `R0+3` is rank 0 and three more."""
    text = format_cpulist(frozenset(ranks))
    return f"{letter}{text if len(text) <= LONGEST else f'{min(ranks)}+{len(ranks) - 1}'}"
