"""Which rank has what of a machine, and in which colour it is drawn."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from launcher.cpulist import format_cpulist
from launcher.plan.model import Gpu, Nic, Plan

PALETTE = (
    "#88ccee",
    "#cc6677",
    "#ddcc77",
    "#117733",
    "#332288",
    "#44aa99",
    "#aa4499",
    "#999933",
    "#882255",
)
"""Paul Tol's "muted" scheme (https://personal.sron.nl/~pault/, SRON/EPS/TN/09-002); ranks beyond the ninth
begin again, with their own numbers."""
DARK, LIGHT = "#222222", "#ffffff"
LONGEST = 5
"""Characters of a list of ranks that a core has room for."""


def find_colour(rank: int) -> str:
    """The colour of a rank."""
    return PALETTE[rank % len(PALETTE)]


def lighten(colour: str) -> str:
    """The light tint of a colour."""
    return "#" + "".join(f"{255 - (255 - value) * 3 // 10:02x}" for value in split_colour(colour))


def find_ink(*fills: str) -> str:
    """Black or white, whichever reads better on these colours (relative luminance of WCAG 2, simplified)."""
    dark = [sum(w * v for w, v in zip((0.2, 0.7, 0.1), split_colour(fill), strict=True)) for fill in fills]
    return LIGHT if dark and sum(dark) / len(dark) < 125 else DARK


def split_colour(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`, 0 to 255."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


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
