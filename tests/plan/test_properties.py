"""Properties of every plan, on random machines and requests that need not be sane."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from launcher.errors import LaunchError
from launcher.plan.model import (
    Cpu,
    Gpu,
    Limits,
    Machine,
    Nic,
    NumaNode,
    Plan,
    Request,
    machine_to_json,
    parse_machine,
)
from launcher.plan.planner import plan

from .lab_machines import ask, convert, describe_machine, describe_overlap


def make_machine(seed: int) -> Machine:
    """Any machine at all: cores over nodes, unlisted nodes, gaps in distance tables, odd sets."""
    random = Random(seed)
    numbers = sorted(random.sample(range(random.choice([30, 2000])), random.randint(1, 24)))
    vendor = random.choice(["nvidia", "nvidia", "amd"])
    return Machine(
        cpus=tuple(make_cpu(random, numbers, number) for number in numbers),
        nodes=tuple(make_node(random, at) for at in range(random.randint(0, 4))),
        gpus=tuple(make_gpu(random, at, vendor, numbers) for at in range(random.randint(0, 5))),
        allowed_cpus=random.choice([frozenset(numbers), pick(random, numbers), pick(random, range(30))]),
        allowed_mems=random.choice([frozenset(range(4)), pick(random, range(6))]),
        isolated=random.choice([frozenset(), pick(random, numbers)]),
        nics=tuple(make_nic(random, at) for at in range(random.choice([0, 0, 1, 3, 6]))),
        limits=Limits(
            cpus=random.choice([None, None, 0.25, 3.0, 500.0]),
            memory_kib=random.choice([None, None, 1, 4 << 20]),
            shm_kib=random.choice([None, None, 0, 64 << 10]),
            files=random.choice([None, None, 0, 600]),
        ),
    )


def make_gpu(random: Random, at: int, vendor: str, numbers: list[int]) -> Gpu:
    """A GPU of any or no known place, at times with MIG instances."""
    return Gpu(
        index=at,
        uuid=random.choice([f"GPU-{at}", f"GPU-{at:016x}", ""]),
        pci=f"0000:{at:02x}:00.0",
        node=random.choice([None, 0, 1, 2, 3, 5]),
        mig=random.choice([(), (), (f"MIG-{at}a", f"MIG-{at}b")]) if vendor == "nvidia" else (),
        vendor=vendor,
        path=make_path(random),
    )


def make_nic(random: Random, at: int) -> Nic:
    """A NIC of any or no known place, link and rate."""
    return Nic(
        name=random.choice([f"mlx5_{at}", f"rdmap{at}s27"]),
        pci="",
        node=random.choice([None, 0, 1, 5]),
        path=make_path(random),
        link_layer=random.choice(["", "InfiniBand", "Ethernet"]),
        rate_gbps=random.choice([0, 100, 400]),
        active=random.random() < 0.8,
    )


def make_path(random: Random) -> tuple[str, ...]:
    """A way through the PCI bridges, perhaps unknown."""
    return tuple(random.choice("ab") for _ in range(random.randint(0, 3)))


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


def find_usable(machine: Machine) -> frozenset[int]:
    """CPUs that the job may use: not isolated ones, unless it has no others."""
    allowed = machine.allowed_cpus & {cpu.id for cpu in machine.cpus}
    return allowed - machine.isolated or allowed


def find_homes(machine: Machine, made: Plan) -> tuple[dict[int, int], list[set[int]]]:
    """The core of each usable CPU, and for each rank the cores of the NUMA nodes nearest to its GPU."""
    usable = find_usable(machine)
    core_of = {cpu.id: cpu.core for cpu in machine.cpus if cpu.id in usable}
    node_of = {cpu.core: cpu.node for cpu in machine.cpus if cpu.id in usable}
    distances = {node.id: dict(node.distances) for node in machine.nodes}
    homes = []
    for rank in made.ranks:
        gpu = rank.gpu
        table = distances.get(gpu.node) if gpu and gpu.node is not None else None
        far = {node: table.get(node, 255) if table else 0 for node in node_of.values()}
        near = {node for node, distance in far.items() if distance == min(far.values())}
        homes.append({core for core, node in node_of.items() if node in near})
    return core_of, homes


MACHINES = st.integers(0, 2**32).map(make_machine)
NAMES = st.sampled_from(
    [
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
        *("OMP_NUM_THREADS", "LAUNCH_NUM_WORKERS", "LAUNCH_NIC", "NCCL_IB_HCA"),
        *("MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMEXPR_MAX_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"),
        *("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "LAUNCH_LOADER_DEFAULT"),
    ]
)
TEXTS = (
    st.text(max_size=8)
    | st.from_regex(r"\A[0-5](,[0-5]){0,3}\Z")
    | st.sampled_from(["GPU-1,GPU-0", "-1", "^=mlx5_0", "=mlx5_0:1,mlx5_1"])
)
REQUESTS = st.builds(
    ask,
    nproc_per_node=st.none() | st.integers(1, 40),
    binding=st.sampled_from(["exclusive", "numa", "socket", "l3", "none"]),
    strict=st.booleans(),
    reserve_cores=st.integers(0, 8),
    devices=st.sampled_from(["all", "own", "spread"]),
    num_workers=st.integers(0, 9),
    worker_gib=st.sampled_from([0.0, 0.5, 1e300]),
    worker_shm_mib=st.sampled_from([0.0, 4.0, 5e-324]),
    nic=st.booleans(),
    environ=st.dictionaries(NAMES, TEXTS, max_size=3),
)


@given(MACHINES, REQUESTS)
def test_masks_are_never_empty_nor_outside_what_the_job_may_use(machine: Machine, request: Request) -> None:
    try:
        made = plan(machine, request)
    except LaunchError as error:
        assert request.binding.strict or not find_usable(machine)
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
        known = {*(nic.name for nic in machine.nics), None, request.environ.get("LAUNCH_NIC")}
        assert rank.nic in known
        assert not {name for name, _ in rank.env} & set(keep_set(request))


NUMBERS = ("OMP_NUM_THREADS", "NUMEXPR_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "LAUNCH_NUM_WORKERS")


def keep_set(request: Request) -> Sequence[str]:
    """The user's variables that nothing may replace, as far as they hold something sensible."""
    own = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if request.devices != "all" else ()
    return [name for name, value in request.environ.items() if value and name not in (*own, *NUMBERS)]


def forgive(request: Request) -> Request:
    return replace(request, binding=replace(request.binding, strict=False))


@given(MACHINES, st.integers(1, 30))
def test_a_warning_has_its_fix(machine: Machine, ranks: int) -> None:
    assume(find_usable(machine))
    environ = {"OMP_PLACES": "cores", "KMP_AFFINITY": "compact", "MKL_NUM_THREADS": "x"}
    request = ask(ranks, num_workers=8, worker_gib=1, worker_shm_mib=100, environ=environ)
    for warning in plan(machine, request).warnings:
        assert warning.what
        assert warning.fix or warning.rule == "machine"
        for text in (warning.what, warning.fix):
            assert text.count("(") == text.count(")"), warning


@given(MACHINES, st.integers(1, 30))
def test_nothing_is_shared_or_idle_where_cores_suffice(machine: Machine, ranks: int) -> None:
    assume(find_usable(machine))
    made = plan(machine, ask(ranks))
    used = Counter(cpu for rank in made.ranks for cpu in rank.cpus)
    workers = Counter(cpu for rank in made.ranks for cpu in rank.worker_cpus)
    assert workers.keys() == find_usable(machine)
    if not any("must share" in warning.what for warning in made.warnings):
        core_of = {cpu.id: cpu.core for cpu in machine.cpus}
        owners = {(core_of[cpu], rank.local_rank) for rank in made.ranks for cpu in rank.cpus}
        assert set(used.values()) == {1}
        assert set(workers.values()) == {1}
        assert len(owners) == len({core for core, _ in owners})


@given(MACHINES, REQUESTS, st.randoms(use_true_random=False))
def test_the_order_of_the_lists_does_not_count(machine: Machine, request: Request, random: Random) -> None:
    assume(find_usable(machine))
    request = forgive(request)

    def shuffle(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(random.sample(items, len(items)))

    mixed = replace(
        machine, cpus=shuffle(machine.cpus), nodes=shuffle(machine.nodes), gpus=shuffle(machine.gpus)
    )
    assert plan(mixed, request).ranks == plan(machine, request).ranks


@given(st.integers(0, 2**32), REQUESTS)
def test_a_snapshot_is_planned_as_the_machine_itself_is(seed: int, request: Request) -> None:
    machine = convert(describe_machine(Random(seed)))
    request = forgive(request)
    snapshot = parse_machine(json.dumps(machine_to_json(machine)))
    assert plan(snapshot, request) == plan(machine, request)


@given(st.integers(0, 2**32), st.integers(1, 24), st.sampled_from([describe_machine, describe_overlap]))
def test_ranks_share_no_core_where_cores_suffice_and_leave_home_only_where_they_must(
    seed: int, ranks: int, describe: Callable[[Random], dict[str, Any]]
) -> None:
    machine = convert(describe(Random(seed)))
    made = plan(machine, ask(ranks))
    core_of, homes = find_homes(machine, made)
    used = [{core_of[cpu] for cpu in rank.cpus} for rank in made.ranks]
    owners = Counter(core for cores in used for core in cores)
    enough = len({*core_of.values()}) >= ranks
    assert (max(owners.values()) > 1) == (not enough)
    at_home = sum(cores <= home for cores, home in zip(used, homes, strict=True))
    assert at_home == (match_cores([sorted(home) for home in homes]) if enough else ranks)
    assert all(cores <= home or not cores & home for cores, home in zip(used, homes, strict=True))


@given(st.integers(0, 2**32), st.sampled_from([describe_machine, describe_overlap]), st.integers(0, 9))
def test_no_rank_has_less_with_its_workers_than_all_could_have(
    seed: int, describe: Callable[[Random], dict[str, Any]], workers: int
) -> None:
    random = Random(seed)
    machine = convert(describe(random))
    ranks = random.randint(1, 20)
    made = plan(machine, ask(ranks, num_workers=workers))
    core_of, _ = find_homes(machine, made)
    total = len({*core_of.values()})
    least = min(len({core_of[cpu] for cpu in rank.worker_cpus}) for rank in made.ranks)
    assert least >= min(max(4, workers + 2), total // ranks)


def match_cores(homes: Sequence[Sequence[int]]) -> int:
    """How many ranks can have a core of their home for themselves: a maximum matching."""
    owner: dict[int, int] = {}

    def give(rank: int, seen: set[int]) -> bool:
        for core in homes[rank]:
            if core not in seen:
                seen.add(core)
                if core not in owner or give(owner[core], seen):
                    owner[core] = rank
                    return True
        return False

    return sum(give(rank, set()) for rank in range(len(homes)))


AMOUNTS = st.sampled_from([0.0, 0.1, 3.0, 1e9])


@given(MACHINES, REQUESTS, AMOUNTS, AMOUNTS, st.sampled_from([None, 0, 700, 4096]))
def test_more_than_one_worker_is_never_more_than_there_is_room_for(
    machine: Machine, asked: Request, gib: float, shm: float, files: int | None
) -> None:
    assume(find_usable(machine) and "LAUNCH_NUM_WORKERS" not in asked.environ)
    limits = replace(machine.limits, memory_kib=8 << 20, shm_kib=64 << 10, files=files)
    loader = replace(asked.dataloader, workload="ours", worker_gib=gib, worker_shm_mib=shm)
    request = replace(forgive(asked), dataloader=loader)
    made = plan(replace(machine, limits=limits), request)
    ranks, usable = len(made.ranks), find_usable(machine)
    cores = len({cpu.core for cpu in machine.cpus if cpu.id in usable})
    time = min(cores, limits.cpus or cores)
    for rank in made.ranks:
        assert min(1, loader.num_workers) <= rank.num_workers <= loader.num_workers
        assert rank.notes[1].startswith(f"num_workers={rank.num_workers}: dataloader")
        own = {cpu.core for cpu in machine.cpus if cpu.id in rank.worker_cpus}
        assert rank.num_workers <= max(1, len(own) - 1)
    least = min(rank.num_workers for rank in made.ranks)
    if least > 1:
        assert ranks * (least + 1) + min(4, ranks / 2) <= time
        assert ranks * least * gib <= 4 or not gib
        assert ranks * least * shm <= 32
        assert files is None or files >= 512 + 64 * least
    busy = [rank for rank in made.ranks if rank.num_workers > 1]
    if len(busy) == ranks:
        assert sum(rank.num_workers + 1 for rank in busy) + min(4, ranks / 2) <= time


def name_as_real_ones(machine: Machine) -> Machine:
    """The machine without MIG instances, its GPUs' UUIDs of one length each, so that none begins another."""
    uuids = [f"GPU-{at:04}" if gpu.uuid else "" for at, gpu in enumerate(machine.gpus)]
    uuids = uuids if all(uuids) else [""] * len(uuids)
    return replace(
        machine,
        gpus=tuple(replace(gpu, uuid=uuid, mig=()) for gpu, uuid in zip(machine.gpus, uuids, strict=True)),
    )


@given(MACHINES.map(name_as_real_ones).filter(find_usable), st.integers(1, 6))
def test_what_ranks_are_shown_is_what_the_plan_says_they_have(machine: Machine, ranks: int) -> None:
    made = plan(machine, ask(ranks, devices="spread")).ranks
    for rank in made[:1] if made[0].gpu else ():
        environ = {name: value for name, value in rank.env if name.endswith("VISIBLE_DEVICES")}
        again = plan(machine, ask(ranks, environ=environ))
        assert [one.gpu for one in again.ranks] == [one.gpu for one in made]
        assert not any("VISIBLE_DEVICES" in str(warning) for warning in again.warnings)
    assert len({rank.gpu for rank in made} - {None}) == min(ranks, len(machine.gpus))


@given(MACHINES, st.integers(1, 24))
def test_gpus_that_are_alike_share_nics_evenly(machine: Machine, ranks: int) -> None:
    assume(find_usable(machine) and machine.gpus)
    gpus = tuple(replace(gpu, node=None, path=(), mig=()) for gpu in machine.gpus)
    nics = tuple(replace(nic, rate_gbps=100, active=True) for nic in machine.nics)
    made = plan(replace(machine, gpus=gpus, nics=nics), ask(ranks))
    assert {rank.nic for rank in made.ranks} <= {nic.name if nic else None for nic in nics or (None,)}
    if nics and ranks == len(gpus):
        load = Counter(rank.nic for rank in made.ranks)
        assert max(load.values()) - min(load[nic.name] for nic in nics) <= 1
