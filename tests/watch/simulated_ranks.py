"""Simulated programs with a slow rank: their nodes' reports, or at once the excess of ranks."""

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from launcher.codec import convert
from launcher.watch.flight_recorder import condense
from launcher.watch.model import Heartbeat, NodeReport

LATENCY = 1e-3
"""Seconds of a collective."""


class World:
    """Ranks with their own times."""

    def __init__(self, simulation: "Simulation") -> None:
        self.setting = simulation
        self.rng = random.Random(simulation.seed)
        self.ranks = range(simulation.ranks)
        self.now = [0.0] * simulation.ranks
        self.step = 0
        self.counts: dict[str, int] = {}
        self.calls: dict[int, list[dict[str, object]]] = {rank: [] for rank in self.ranks}
        self.step_ends: dict[int, list[float]] = {rank: [] for rank in self.ranks}

    def compute(self, seconds: float) -> None:
        """Have each rank do its own part of a step."""
        for rank in self.ranks:
            more = self.setting.excess if rank == self.setting.slow else 0.0
            noise = max(0.1, 1 + self.rng.gauss(0, self.setting.noise))
            self.now[rank] += seconds * noise * (1 + more)

    def call(self, group: str = "0", members: Iterable[int] | None = None) -> float:
        """Have ranks enqueue a collective; return when it is done."""
        members = list(self.ranks if members is None else members)
        self.counts[group] = number = self.counts.get(group, 0) + 1
        done = max(self.now[rank] for rank in members) + LATENCY
        for rank in members:
            entry = {"process_group": [group, ""], "pg_id": group, "collective_seq_id": number}
            timing = {"duration_ms": 1e3 * (done - self.now[rank])} if self.setting.durations else {}
            nanoseconds = int(self.read_clock(rank) * 1e9)
            self.calls[rank].append({**entry, **timing, "time_created_ns": nanoseconds})
        return done

    def wait(self, done: float, members: Iterable[int] | None = None) -> None:
        """Have ranks wait for a collective."""
        for rank in self.ranks if members is None else members:
            self.now[rank] = max(self.now[rank], done)

    def read_clock(self, rank: int) -> float:
        """Return the time on the clock of a rank's node."""
        clocks = self.setting.clocks
        return 1e6 + self.now[rank] + clocks[rank * len(clocks) // len(self.now)]

    def end_step(self) -> None:
        for rank in self.ranks:
            self.step_ends[rank].append(self.read_clock(rank))


def step_ddp(world: World) -> None:
    """Four buckets, for which the ranks wait at the end of the backward pass."""
    world.compute(0.04)
    done = 0.0
    for _ in range(4):
        world.compute(0.015)
        done = world.call()
    world.wait(done)
    world.compute(0.002)


def step_once(world: World) -> None:
    """One all_reduce."""
    world.compute(0.1)
    world.wait(world.call())
    world.compute(0.002)


def step_tensor_parallel(world: World) -> None:
    """Many collectives, and the ranks wait for each."""
    for _ in range(20):
        world.compute(0.005)
        world.wait(world.call())


def step_fsdp(world: World) -> None:
    """Twelve layers, of which the next is gathered while one is computed, there and back."""
    for seconds, is_back in ((0.004, False), (0.006, True)):
        gathered, reduced = world.call(), 0.0
        for layer in range(12):
            following = world.call() if layer < 11 else 0.0
            world.wait(gathered)
            world.compute(seconds)
            world.wait(reduced)
            reduced = world.call() if is_back else 0.0
            gathered = following
        world.wait(reduced)
    world.compute(0.002)


def step_two_groups(world: World) -> None:
    """Tensor parallel in pairs, data parallel between them."""
    for _ in range(8):
        world.compute(0.012)
        for first in world.ranks[::2]:
            world.wait(world.call(f"pair {first}", (first, first + 1)), (first, first + 1))
    for lane in range(2):
        world.wait(world.call(f"lane {lane}", world.ranks[lane::2]), world.ranks[lane::2])
    world.compute(0.002)


PROGRAMS: dict[str, Callable[[World], None]] = {
    "ddp": step_ddp,
    "one all_reduce": step_once,
    "tensor parallel": step_tensor_parallel,
    "fsdp": step_fsdp,
    "two groups": step_two_groups,
}


@dataclass(frozen=True, slots=True)
class Simulation:
    """A program's run."""

    program: str
    ranks: int
    slow: int
    excess: float
    """By how much longer the slow rank's own parts take."""
    noise: float
    """Standard deviation of each part, as a share of it."""
    seed: int
    clocks: tuple[float, ...] = (0.0,)
    """Offsets of the nodes' clocks; the ranks are shared out over nodes in their order."""
    durations: bool = False
    """The recorder has those of collectives, as with NCCL's timing."""

    def run(self, steps: int) -> list[dict[str, Any]]:
        """Return the reports of all nodes as JSON, n0 to the last, with what the ranks' recorders say."""
        world, nodes = World(self), len(self.clocks)
        for world.step in range(1, steps + 1):
            PROGRAMS[self.program](world)
            world.end_step()
        reports: list[dict[str, Any]] = [
            {"host": f"n{node}", "node_rank": node, "nodes": nodes, "ranks": [], "collectives": []}
            for node in range(nodes)
        ]
        for rank in world.ranks:
            ends = tuple(world.step_ends[rank])
            beat = Heartbeat(rank, 0, 100, "training", 0.0, steps, ends[-1], ends[-1], 0, 0.0, step_ends=ends)
            times = condense(json.dumps({"entries": world.calls[rank]}).encode(), beat, 1 << 20)
            report = reports[rank * nodes // self.ranks]
            report["ranks"].append({**HEALTHY, "rank": rank, "step": steps})
            report["collectives"].append(times)
        return reports


HEALTHY = {
    "local_rank": 0,
    "pid": 100,
    "attempt": 0,
    "phase": "training",
    "step_age": 0.1,
    "data_share": 0.01,
    "cpu": 0.95,
    "thread_delay": 0.01,
    "gpu": {"index": 0, "sm_clock": 1980, "pcie_width": 16, "max_pcie_width": 16},
}
"""What a report has of a rank that nothing is wrong with."""


def make_reports(
    reports: list[dict[str, Any]], number: int, ranks: Mapping[int, Mapping[str, Any]] = {}
) -> list[NodeReport]:
    """Return the reports with this number, with more of some ranks."""
    found = []
    for report in reports:
        own = [{**rank, **ranks.get(rank["rank"], {})} for rank in report["ranks"]]
        rest = {"attempt": 0, "time": 5.0 * number, "number": number, "interval": 5.0}
        plain = {key: value for key, value in report.items() if key != "collectives"}
        made = convert(NodeReport, {**plain, **rest, "ranks": own})
        found.append(replace(made, collectives=tuple(report["collectives"])))
    return found


def draw_noise(rng: random.Random, kind: str, sigma: float) -> float:
    """Return a step's noise of a rank, as a share of the step."""
    if kind == "heavy tails":  # Student's t with two degrees of freedom
        student = rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.0, 1.0))
        return max(-0.5, min(20.0, student * sigma * 0.7))
    if kind == "one-sided":
        return rng.expovariate(1 / sigma)
    return max(-0.9, rng.gauss(0, sigma))


def simulate_excess(
    ranks: int, steps: int, kind: str, sigma: float, *, slow: int | None, seed: int = 0
) -> Any:
    """Return the steps of ranks that wait for each other once a step, as `measure_steps` does.

    One may be slower by a tenth.
    """
    rng = random.Random(seed)
    found = []
    for step in range(1, steps + 1):
        own = [1 + draw_noise(rng, kind, sigma) + (0.1 if rank == slow else 0.0) for rank in range(ranks)]
        others = [np.median(own if ranks > 16 else np.delete(own, rank)) for rank in range(min(ranks, 17))]
        found.append([step, max(own) + 0.02, *np.subtract(own, others if ranks <= 16 else others[0])])
    return np.array(found)
