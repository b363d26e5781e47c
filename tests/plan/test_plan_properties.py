"""Properties of every plan, on random machines and requests that need not be sane."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from random import Random
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from launcher.errors import LaunchError
from launcher.plan.model import Cpu, Gpu, Machine, NumaNode, Plan, Request
from launcher.plan.planner import POLICIES, plan
from launcher.plan.shares import cut_evenly, find_edges, order_sizes
from launcher.plan.topology import find_usable

from .plan_lab import convert, score
from .plan_random import describe_machine


def make_machine(seed: int) -> Machine:
    """Any machine at all: cores over nodes, unlisted nodes, gaps in distance tables, odd sets."""
    random = Random(seed)
    numbers = sorted(random.sample(range(random.choice([30, 2000])), random.randint(1, 24)))
    cpus = tuple(make_cpu(random, numbers, number) for number in numbers)
    nodes = tuple(make_node(random, at) for at in range(random.randint(0, 4)))
    gpus = tuple(
        Gpu(
            at,
            f"GPU-{at}",
            f"0000:{at:02x}:00.0",
            random.choice([None, 0, 1, 2, 3, 5]),
            pick(random, numbers),
        )
        for at in range(random.randint(0, 5))
    )
    allowed = random.choice([frozenset(numbers), pick(random, numbers), pick(random, range(30))])
    mems = random.choice([frozenset(range(4)), pick(random, range(6))])
    isolated = random.choice([frozenset(), pick(random, numbers)])
    return Machine(cpus, nodes, gpus, allowed, mems, isolated)


def make_cpu(random: Random, numbers: list[int], number: int) -> Cpu:
    """A CPU, at times a sibling of an earlier one, at times on another node than it."""
    core = random.choice([number, number, numbers[numbers.index(number) // 2]])
    package, node, l3 = (random.randrange(4) for _ in range(3))
    return Cpu(number, core, package, node, l3, random.choice([1024, 1024, 980, 512]))


def make_node(random: Random, at: int) -> NumaNode:
    """A node with any table of distances, even none."""
    table = tuple(
        (other, random.choice([0, 10, 12, 32, 255]))
        for other in random.sample(range(6), random.randint(0, 5))
    )
    return NumaNode(at, random.choice([0, 2**20]), random.random() < 0.7, table)


def pick(random: Random, numbers: Sequence[int]) -> frozenset[int]:
    """A subset, perhaps empty."""
    return frozenset(random.sample(numbers, random.randint(0, len(numbers))))


MACHINES = st.integers(0, 2**32).map(make_machine)
NAMES = st.sampled_from(
    ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LAUNCH_NUM_WORKERS", "CUDA_DEVICE_ORDER"]
)
TEXTS = (
    st.text(max_size=8) | st.from_regex(r"\A[0-5](,[0-5]){0,3}\Z") | st.sampled_from(["GPU-1,GPU-0", "-1"])
)
REQUESTS = st.builds(
    Request,
    nproc_per_node=st.none() | st.integers(1, 40),
    binding=st.sampled_from(sorted(POLICIES)),
    strict=st.booleans(),
    reserve_cores=st.integers(0, 8),
    devices=st.sampled_from(["all", "own"]),
    num_workers=st.integers(0, 9),
    environ=st.dictionaries(NAMES, TEXTS, max_size=3).map(lambda names: tuple(names.items())),
)


@given(MACHINES, REQUESTS)
@settings(max_examples=400, deadline=None)
def test_masks_are_never_empty_nor_outside_what_the_job_may_use(machine: Machine, request: Request) -> None:
    try:
        made = plan(machine, request)
    except LaunchError as error:
        assert request.strict or not find_usable(machine)
        assert ": " in str(error)
        return
    usable = find_usable(machine)
    assert [rank.local_rank for rank in made.ranks] == list(range(len(made.ranks)))
    assert len(made.ranks) == request.nproc_per_node or request.nproc_per_node is None
    for rank in made.ranks:
        assert rank.cpus
        assert rank.cpus <= rank.worker_cpus <= usable
        assert rank.memory.nodes <= machine.allowed_mems
        assert rank.omp_num_threads >= 1
        assert rank.num_workers >= 0
        assert rank.notes


@given(MACHINES, st.integers(1, 30))
@settings(max_examples=300, deadline=None)
def test_nothing_is_shared_or_idle_where_cores_suffice(machine: Machine, ranks: int) -> None:
    assume(find_usable(machine))
    made = plan(machine, Request(ranks))
    used = Counter(cpu for rank in made.ranks for cpu in rank.cpus)
    workers = Counter(cpu for rank in made.ranks for cpu in rank.worker_cpus)
    assert workers.keys() == find_usable(machine)
    if not any("must share" in warning for warning in made.warnings):
        core_of = {cpu.id: cpu.core for cpu in machine.cpus}
        owners = {(core_of[cpu], rank.local_rank) for rank in made.ranks for cpu in rank.cpus}
        assert set(used.values()) == {1}
        assert set(workers.values()) == {1}
        assert len(owners) == len({core for core, _ in owners})


@given(MACHINES, REQUESTS, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_the_order_of_the_lists_does_not_count(machine: Machine, request: Request, random: Random) -> None:
    assume(find_usable(machine))
    request = replace(request, strict=False)

    def shuffle(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(random.sample(items, len(items)))

    mixed = replace(
        machine, cpus=shuffle(machine.cpus), nodes=shuffle(machine.nodes), gpus=shuffle(machine.gpus)
    )
    assert plan(mixed, request).ranks == plan(machine, request).ranks


@given(st.integers(0, 2**32), REQUESTS)
@settings(max_examples=150, deadline=None)
def test_sane_machines_and_any_request(seed: int, request: Request) -> None:
    machine = convert(describe_machine(Random(seed)))
    assume(machine.allowed_cpus)
    first: Plan = plan(machine, replace(request, strict=False))
    assert first == plan(machine, replace(request, strict=False))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 7))
def test_sizes_are_ordered_as_well_as_any_order_could(blocks: list[int], count: int) -> None:
    names = [at for at, size in enumerate(blocks) for _ in range(size)]
    edges = find_edges(names)
    sizes = order_sizes(len(names), count, edges)
    assert sum(sizes) == len(names)
    assert max(sizes) - min(sizes) <= 1

    def count_splits(order: tuple[int, ...]) -> int:
        ends = [sum(order[: at + 1]) for at in range(count)]
        return sum(end not in edges and end > 0 for end in ends)

    assert count_splits(tuple(sizes)) == min(map(count_splits, set(permutations(sizes))))
    if len(names) >= count:
        assert count_splits(tuple(sizes)) == score.split_bound(tuple(sizes), tuple(blocks))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 30))
def test_those_with_least_get_the_odd_items(totals: list[int], items: int) -> None:
    cuts = cut_evenly([0] * items, totals)
    sizes = [cut.stop - cut.start for cut in cuts]
    assert sum(sizes) == items
    assert max(sizes) - min(sizes) <= 1
    if len(set(totals)) > 1:
        more = [total for total, size in zip(totals, sizes, strict=True) if size > min(sizes)]
        less = [total for total, size in zip(totals, sizes, strict=True) if size == min(sizes)]
        assert not more or max(more) <= min(less)
