"""The placement as a table for people."""

from rich.console import Console
from rich.table import Table

from launcher.cpulist import format_cpulist
from launcher.plan.model import Plan, RankPlan

NUMBERS = ("rank", "workers", "threads")


def print_placement(console: Console, plan: Plan, *, explain: bool = False) -> None:
    """Print a row for each rank, what `explain` asks to know of each, and the warnings."""
    rows = [describe_rank(rank) for rank in plan.ranks]
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if title in NUMBERS else "left")
    for row in rows:
        table.add_row(*(row[title] or "-" for title in titles))
    console.print(table)
    for rank in plan.ranks if explain else ():
        for note in rank.notes:
            console.print(f"rank {rank.local_rank}: {note}", style="dim", markup=False, highlight=False)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)


def describe_rank(rank: RankPlan) -> dict[str, str]:
    """Return the cells of one rank by their titles; a column that is empty for all ranks is left out."""
    return {
        "rank": str(rank.local_rank),
        "gpu": str(rank.gpu.index) if rank.gpu else "",
        "pci": rank.gpu.pci if rank.gpu else "",
        "cpus": format_cpulist(rank.cpus),
        "workers on": format_cpulist(rank.worker_cpus),
        "memory": f"{rank.memory.policy} {format_cpulist(rank.memory.nodes)}".strip(),
        "workers": str(rank.num_workers),
        "threads": str(rank.omp_num_threads),
    }
