"""Simulated programs with a slow rank: the marks that their ranks leave, or at once the excess of ranks."""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from launcher.watch.flight_recorder import STEP_ENDS, Mark
from launcher.watch.own_time import StepExcess, subtract_others

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
        self.marks: dict[int, list[Mark]] = {rank: [] for rank in self.ranks}

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
        for rank in members:
            self.mark(rank, group, number)
        return max(self.now[rank] for rank in members) + LATENCY

    def wait(self, done: float, members: Iterable[int] | None = None) -> None:
        """Have ranks wait for a collective."""
        for rank in self.ranks if members is None else members:
            self.now[rank] = max(self.now[rank], done)

    def mark(self, rank: int, group: str, number: int) -> None:
        """Leave a mark by the clock of a rank's node."""
        clocks = self.setting.clocks
        offset = clocks[rank * len(clocks) // len(self.now)]
        self.marks[rank].append(Mark(self.step, group, number, self.now[rank] + offset))


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

    def run(self, steps: int) -> dict[int, list[Mark]]:
        """Return the marks of all ranks."""
        world = World(self)
        for world.step in range(1, steps + 1):
            PROGRAMS[self.program](world)
            for rank in world.ranks:
                world.mark(rank, STEP_ENDS, world.step)
        return world.marks


def draw_noise(rng: random.Random, kind: str, sigma: float, before: float) -> float:
    """Return a step's noise of a rank, as a share of the step; `before` is that of the step before."""
    if kind == "heavy tails":  # Student's t with two degrees of freedom
        student = rng.gauss(0, 1) / math.sqrt(rng.gammavariate(1.0, 1.0))
        return max(-0.5, min(20.0, student * sigma * 0.7))
    if kind == "one-sided":
        return rng.expovariate(1 / sigma)
    if kind == "drift":  # half of it lasts 20 steps
        drifted: float = 0.95 * before + 0.3 * rng.gauss(0, sigma)
        return drifted
    return max(-0.9, rng.gauss(0, sigma))


def simulate_excess(
    ranks: int, steps: int, kind: str, sigma: float, *, slow: int | None, excess: float = 0.1, seed: int = 0
) -> tuple[StepExcess, ...]:
    """Return the steps of ranks that wait for each other once a step."""
    rng = random.Random(seed)
    noise, found = [0.0] * ranks, []
    for step in range(1, steps + 1):
        noise = [draw_noise(rng, kind, sigma, before) for before in noise]
        own = [1 + value + (excess if rank == slow else 0.0) for rank, value in enumerate(noise)]
        found.append(StepExcess(step, max(own) + 0.02, dict(enumerate(subtract_others(own)))))
    return tuple(found)
