"""Who places ranks well: `launch`, torchrun's `--numa-binding` and numa-set.sh, by the lab's score."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from tests.benchmarks.machines import write_tree
from tests.benchmarks.peers import Ask, Placed, ask_launch, ask_numa_set, start_torch
from tests.plan.lab_machines import NAMES, Data, load, score
from tests.plan.random_machines import describe_machine
from tests.probe.machine_trees import short_lived

MEASURES = ("ROB", "LOC", "EXC", "SMT", "SPAN", "MEM", "BAL", "L3", "IDLE", "PACE")
SHOWN = (
    "launch exclusive",
    "torchrun exclusive",
    "torchrun node",
    "torchrun socket",
    "torchrun core-complex",
    "numa-set.sh",
)
"""Planners of the table by machine; the table by planner has all."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the score says of one planner on one machine."""

    error: str
    """What the planner ended with; empty where it made a plan."""
    shorts: tuple[str, ...]
    """Measures that miss their bound: all of them where there is no plan, or not one to be judged."""

    @property
    def holds(self) -> bool:
        """Whether every measure is at its bound."""
        return not self.shorts

    @property
    def cell(self) -> str:
        """The verdict in a table."""
        if self.shorts == MEASURES:
            return "fails" if self.error else "ROB"
        return " ".join(self.shorts) or "holds"


Row = Mapping[str, Verdict]
"""The verdicts on one machine, by the planner's name."""


def judge(data: Data, placed: Placed) -> Verdict:
    """Score a plan; the score goes no further than ROB where a mask is empty or not the job's."""
    if isinstance(placed, str):
        return Verdict(placed, MEASURES)
    result = score.score(data, placed)
    if result["ROB"][0] < 1:
        return Verdict("", MEASURES)
    return Verdict("", tuple(name for name in MEASURES if not score.holds({name: result[name]})))


@contextmanager
def start_planners() -> Iterator[tuple[Ask, ...]]:
    """Give what asks each tool."""
    with start_torch() as ask_torch:
        yield ask_launch, ask_torch, ask_numa_set


def judge_machine(asks: Sequence[Ask], data: Data) -> Row:
    """Judge every planner on a machine, which is written out for the time."""
    with short_lived() as folder:
        root = write_tree(data, folder)
        placed = {name: made for ask in asks for name, made in ask(data, root).items()}
    return {name: judge(data, made) for name, made in placed.items()}


def bench_planners(seeds: int = 200) -> None:
    """Judge all planners on the lab's machines, and on random ones."""
    with start_planners() as asks:
        rows = {name: judge_machine(asks, load(name)) for name in NAMES}
        print_machines(rows)
        print_planners("Planners on the lab's machines", rows.values())
        print_errors(rows)
        random_rows = [judge_machine(asks, data) for data in islice(make_random(), seeds)]
    print_planners(f"Planners on {seeds} machines of tests/plan/random_machines.py", random_rows)


def make_random() -> Iterator[Data]:
    """Random machines with GPUs: torchrun's modes need one.

    Firmware that puts two nodes at a distance of 10 is not believed by the kernel, which then shows 20
    between all nodes (slit_valid in drivers/acpi/numa/srat.c): no tree can say otherwise.
    """
    for seed in count():
        data = {**describe_machine(Random(seed)), "name": f"random-{seed}"}
        if min(data["distance"]) <= 10:
            data["distance"] = [20, 20]
        if data["gpus"]:
            yield data


def print_machines(rows: Mapping[str, Row]) -> None:
    """Print a table, a row for each machine: `holds`, the measures that miss their bound, or `fails`."""
    print(f"\nPlacement by machine\n\n| machine | {' | '.join(f'`{name}`' for name in SHOWN)} |")
    print("|---" * (len(SHOWN) + 1) + "|")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(row[planner].cell for planner in SHOWN)} |")
    holding = [sum(row[planner].holds for row in rows.values()) for planner in SHOWN]
    print(f"| holds | {' | '.join(f'**{number} of {len(rows)}**' for number in holding)} |")


def print_planners(title: str, rows: Iterable[Row]) -> None:
    """Print a table, a row for each planner; where a planner fails, no measure is at its bound."""
    rows = list(rows)
    print(f"\n{title}\n\n| planner | machines that hold | measures at their bound | fails on |")
    print("|---|---|---|---|")
    for planner in rows[0]:
        verdicts = [row[planner] for row in rows]
        reached = sum(len(MEASURES) - len(verdict.shorts) for verdict in verdicts)
        share = reached / len(MEASURES) / len(rows)
        holding, failing = sum(v.holds for v in verdicts), sum(bool(v.error) for v in verdicts)
        print(f"| `{planner}` | {holding} of {len(rows)} | {share:.0%} | {failing} |")


def print_errors(rows: Mapping[str, Row]) -> None:
    """Print what planners ended with where they failed."""
    print("\nFailures\n")
    for name, row in rows.items():
        for planner, verdict in row.items():
            if verdict.error:
                print(f"- `{planner}` on {name}: {verdict.error}")
