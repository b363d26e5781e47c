"""Simulated programs with a slow rank: the marks that their ranks leave, or at once the excess of ranks."""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from launcher.watch.collective_marks import STEP_ENDS, Mark
from launcher.watch.excess_history import ExcessHistory
from launcher.watch.own_time import StepExcess, measure_steps, subtract_others

NOISES = (
    ("normal", 0.02),
    ("normal", 0.05),
    ("normal", 0.1),
    ("heavy tails", 0.03),
    ("one-sided", 0.05),
    ("drift", 0.03),
)
"""Kinds of noise, with their standard deviation (or mean) as a share of a step."""
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


def bench_simulated_stragglers(runs: int) -> None:
    """Simulate runs with a rank that is 10% slower, and without one; print what is found."""
    print(
        f"\n{runs} simulated runs each (a hundredth with 1,000 ranks): 100 steps with a rank 10% slower,"
        " 300 steps without\n"
    )
    print("| ranks | noise of a step | found in 100 steps | another rank | steps needed | healthy: reports |")
    print("|---" * 6 + "|")
    for ranks in (2, 8, 1000):
        count = runs if ranks < 1000 else max(1, runs // 100)
        for kind, sigma in (
            ("normal", 0.02),
            ("normal", 0.05),
            ("normal", 0.1),
            ("heavy tails", 0.03),
            ("one-sided", 0.05),
            ("drift", 0.03),
        ):
            print(
                f"| {ranks:,} | {kind}, {sigma:.0%} | {simulate_row(ranks, kind, sigma, count)} |", flush=True
            )
    print("\nPrograms, by their marks (8 ranks on 4 nodes, clocks apart)\n")
    for program in PROGRAMS:
        print(f"{program}: {simulate_program(program, max(1, runs // 20))}", flush=True)


def simulate_row(ranks: int, kind: str, sigma: float, runs: int) -> str:
    """Return the cells of one kind of noise."""
    needed, others, false = [], 0, 0
    for seed in range(runs):
        history, slow = ExcessHistory(), seed % ranks
        for step in simulate_excess(ranks, 100, kind, sigma, slow=slow, seed=seed):
            found = [one.rank for one in history.add([step])]
            needed += [step.step] if slow in found else []
            others += len([rank for rank in found if rank != slow])
        false += len(ExcessHistory().add(simulate_excess(ranks, 300, kind, sigma, slow=None, seed=seed)))
    steps = f"{median(needed):.0f}" if needed else "-"
    return f"{len(needed)} of {runs} | {others} | {steps} | {false} in {runs} runs"


def simulate_program(program: str, runs: int) -> str:
    """Return how often the slow rank of a program was found, and others, and in healthy runs."""
    hosts = {rank: f"n{rank // 2}" for rank in range(8)}
    right = wrong = false = 0
    for seed in range(runs):
        setting = Simulation(program, 8, seed % 8, 0.1, 0.05, seed, (0.0, 0.02, -0.01, 1.0))
        found = [one.rank for one in ExcessHistory().add(measure_steps(setting.run(100), hosts))]
        right += seed % 8 in found
        wrong += len(set(found) - {seed % 8})
        healthy = Simulation(program, 8, -1, 0.0, 0.05, seed, setting.clocks)
        false += len(ExcessHistory().add(measure_steps(healthy.run(100), hosts)))
    return f"found {right} of {runs}, others {wrong}, healthy {false}"
