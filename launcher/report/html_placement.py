"""The report's section of where ranks ran: a picture of each kind of machine, and a table."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.doctor.placement_checks import judge_host
from launcher.plan.model import Plan
from launcher.report.html_page import Chart, Head, HtmlTable, Section, make_chart
from launcher.report.inline_svg import inline_svg
from launcher.report.machine_picture import DRAWS, render_machine
from launcher.report.run_account import RunAccount
from launcher.text import clean_text, count_things, shorten_cpulist

MOST_PICTURES = 3
"""Machines that are drawn; others are often alike, and those alike are drawn once."""
MOST_ROWS = 64
"""Rows of the table."""
MOST_PUS = 2048
"""Of a machine that is drawn."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A host's plan, and the classes of its cores by their capacity."""

    host: str
    plan: Plan
    classes: Mapping[int, int]


def make_placement(account: RunAccount, hosts: Sequence[HostPlan]) -> Section:
    """Return where the ranks ran: a picture of each kind of machine, and a table."""
    figures = tuple(draw_machines(hosts)) if DRAWS else ()
    rows = tuple(list_placements(account))
    heads = ("rank", "host", "GPU", "CPUs", "memory on", "workers", "NIC", "as planned")
    numbers = ("workers",)
    left = f", the first {MOST_ROWS} of {len(rows)}" if len(rows) > MOST_ROWS else ""
    table = HtmlTable(
        f"What the ranks had{left}", tuple(Head(name, name in numbers) for name in heads), rows[:MOST_ROWS]
    )
    return Section("placement", "Where the ranks ran", figures=figures, tables=(table,) if rows else ())


def draw_machines(hosts: Sequence[HostPlan]) -> Iterator[Chart]:
    """Draw the machines with their ranks, those that look alike once."""
    alike: dict[object, list[str]] = {}
    plans: dict[object, HostPlan] = {}
    for host in hosts:
        if len(host.plan.machine.cpus) > MOST_PUS:
            continue
        key = describe_shape(host.plan)
        alike.setdefault(key, []).append(clean_text(host.host))
        plans.setdefault(key, host)
    for number, (key, names) in enumerate(list(alike.items())[:MOST_PICTURES]):
        host = plans[key]
        picture = render_machine(host.plan, host.classes, "", "svg")
        more = f", and on {count_things(len(names) - 1, 'more host')} like it" if len(names) > 1 else ""
        title = f"{count_things(len(host.plan.ranks), 'rank')} on {names[0]}{more}"
        about = (
            "Packages, NUMA nodes, caches, cores, GPUs and NICs, each in the colour of the rank that has it."
        )
        svg = inline_svg(picture, f"machine{number}", title, about, smallest=0.7)
        left = len(alike) - MOST_PICTURES if number == MOST_PICTURES - 1 else 0
        notes = (f"{count_things(left, 'other kind')} of hosts are not drawn.",) if left > 0 else ()
        yield make_chart(title, [("light", svg)], notes=notes)


def describe_shape(plan: Plan) -> object:
    """Return what a picture of a plan shows, less the names of the devices."""
    machine = plan.machine
    ranks = tuple((rank.cpus, rank.worker_cpus, rank.nic, rank.memory) for rank in plan.ranks)
    gpus = tuple((gpu.pci, gpu.node, gpu.name) for gpu in machine.gpus)
    return machine.cpus, machine.allowed_cpus, gpus, ranks


def list_placements(account: RunAccount) -> Iterator[tuple[str, ...]]:
    """Give a row for each rank that left a record."""
    for host in account.records.hosts:
        wrong = [finding.what for finding in judge_host(host, True)]
        planned = {rank.local_rank: rank for rank in host.planned}
        for record in host.records:
            plan = planned.get(record.local_rank)
            gpu = f"{plan.gpu.index} {plan.gpu.pci}" if plan and plan.gpu else "none"
            cells = (
                str(record.rank),
                record.host,
                gpu if record.gpu is not None else "none",
                record.cpus,
                f"node {shorten_cpulist(record.memory.nodes)}" if record.memory.nodes else "any node",
                "?" if record.num_workers is None else str(record.num_workers),
                (plan.nic if plan else None) or "none",
                "no"
                if any(re.search(rf"(?<!local )\brank {record.rank}\b", what) for what in wrong)
                else "yes"
                if plan
                else "no plan",
            )
            yield tuple(clean_text(cell, 120) for cell in cells)
