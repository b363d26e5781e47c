"""The placement as a table for people."""

from rich.console import Console
from rich.table import Table

from launcher.cpulist import format_cpulist
from launcher.plan.model import Plan, RankPlan


def print_placement(console: Console, plan: Plan, *, explain: bool = False) -> None:
    """Print a row for each rank, what `explain` asks to know of each, and the warnings."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("rank", "gpu", "pci", "cpus", "workers on", "memory", "workers", "threads"):
        table.add_column(title, justify="right" if title in ("rank", "workers", "threads") else "left")
    for rank in plan.ranks:
        table.add_row(*describe_rank(rank))
    console.print(table)
    for rank in plan.ranks if explain else ():
        for note in rank.notes:
            console.print(f"rank {rank.local_rank}: {note}", style="dim", markup=False, highlight=False)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)


def describe_rank(rank: RankPlan) -> tuple[str, ...]:
    """Return the cells of one rank."""
    memory = f"{rank.memory.policy} {format_cpulist(rank.memory.nodes)}".strip()
    return (
        str(rank.local_rank),
        str(rank.gpu.index) if rank.gpu else "-",
        rank.gpu.pci if rank.gpu else "-",
        format_cpulist(rank.cpus),
        format_cpulist(rank.worker_cpus),
        memory,
        str(rank.num_workers),
        str(rank.omp_num_threads),
    )
