"""DataLoader workers: the book's rule for cores, memory, /dev/shm, descriptors, and what is said of them."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from launcher.errors import UsageError
from launcher.plan.model import Limits, Machine, Plan, Request
from launcher.plan.planner import plan
from launcher.plan.rules import WORKLOADS
from launcher.plan.usable_cores import find_usable
from launcher.plan.workers_and_threads import level_workers

from .lab_machines import convert, describe, load
from .test_properties import MACHINES, REQUESTS
from .test_rank_settings import CONF

EIGHT = [0] * 4 + [1] * 4
SMALLER = convert(describe(["0-63", "64-127"], EIGHT))
"""128 cores, 128 GiB."""
LARGE = replace(SMALLER, nodes=tuple(replace(node, memory_kib=1 << 30) for node in SMALLER.nodes))
"""128 cores, 2 TiB."""
VISION = Request(workload="vision", num_workers=4, worker_gib=1, worker_shm_mib=147)


def count(made: Plan) -> list[int]:
    return [rank.num_workers for rank in made.ranks]


def tell(made: Plan, rank: int = 0) -> str:
    return made.ranks[rank].notes[1]


@pytest.mark.parametrize(
    ("sockets", "wanted", "workers"),
    [
        (["0-13", "14-27"], 2, 2),
        (["0-13", "14-27"], 9, 2),
        (["0-12", "13-26"], 2, 1),
        (["0-21", "22-43"], 4, 4),
        (["0-21", "22-43"], 9, 4),
        (["0-20", "21-42"], 4, 3),
        (["0-11", "12-27"], 2, 2),
    ],
)
def test_the_books_rule_holds_on_its_examples_with_uneven_shares_too(
    sockets: list[str], wanted: int, workers: int
) -> None:
    made = plan(convert(describe(sockets, EIGHT)), Request(workload="ours", num_workers=wanted))
    assert count(made) == [workers] * 8
    if sockets[0] == "0-13":
        assert sorted({len(rank.cpus) for rank in made.ranks}) == [3, 4]


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"),
    [("0", 1, 1), ("0-1", 1, 1), ("0-1", 2, 1), ("0-3", 1, 2), ("0-3", 2, 1), ("0-4", 2, 1), ("0-6", 2, 2)],
)
def test_small_machines_have_a_worker_and_more_where_cores_allow(
    cores: str, ranks: int, workers: int
) -> None:
    made = plan(convert(describe([cores], [0] * ranks)), Request(workload="ours", num_workers=4))
    assert [min(count(made)), max(count(made))] == [workers] * 2


def test_ranks_share_all_cores_where_each_asks_for_more() -> None:
    made = plan(
        convert(describe(["0-31", "32-63"], [0, 1, 1, 1, 1])), Request(workload="ours", num_workers=99)
    )
    assert count(made) == [12, 11, 11, 11, 11]
    assert tell(made, 0).endswith("at most 12 for 64 cores and 5 ranks")
    assert tell(made, 1).endswith("at most 11 for its 12 cores")


def test_cores_kept_back_count_for_the_system() -> None:
    machine = convert(describe(["0-13", "14-27"], EIGHT))
    assert count(plan(machine, Request(reserve_cores=4))) == [2] * 8


@pytest.mark.parametrize(
    ("memory", "workers"), [(128, 4), (80, 4), (70, 3), (20, 1), (4, 1)], ids=lambda value: f"{value}"
)
def test_half_of_the_cgroups_memory_is_for_workers(memory: int, workers: int) -> None:
    made = plan(replace(LARGE, limits=Limits(memory_kib=memory << 20)), VISION)
    assert count(made) == [workers] * 8
    assert len(made.warnings) == (workers < 4)
    if workers < 4:
        assert f"{memory} GiB of memory, 1.14 GiB for each worker" in tell(made)
        assert "set dataloader.worker_gib to what one takes" in made.warnings[0]


def test_the_smallest_of_what_is_known_of_memory_counts() -> None:
    small = replace(LARGE, memory_kib=40 << 20, limits=Limits(memory_kib=100 << 20))
    assert count(plan(small, VISION)) == [2] * 8
    barred = replace(SMALLER, allowed_mems=frozenset({0}))
    assert "at most 3 for 64 GiB of memory" in tell(plan(barred, VISION))
    gpus_own = replace(SMALLER, nodes=(SMALLER.nodes[0], replace(SMALLER.nodes[1], normal=False)))
    assert "64 GiB" in tell(plan(gpus_own, VISION))
    unknown = replace(LARGE, nodes=tuple(replace(node, memory_kib=0) for node in LARGE.nodes))
    assert count(plan(unknown, replace(VISION, worker_gib=1000))) == [4] * 8


def test_what_a_worker_takes_may_be_unknown() -> None:
    tight = replace(LARGE, limits=Limits(memory_kib=1, shm_kib=1))
    assert count(plan(tight, Request(num_workers=4))) == [4] * 8


def test_dockers_own_shared_memory_is_warned_of_with_its_fix() -> None:
    docker = replace(LARGE, limits=Limits(shm_kib=64 << 10))
    made = plan(docker, VISION)
    assert count(made) == [1] * 8
    assert tell(made) == (
        "num_workers=1: dataloader=vision asks for 4; at most 0 for 64 MiB of /dev/shm, 147 MiB for each "
        "worker, yet at least 1"
    )
    assert made.warnings == (
        "dataloader=vision asks for 4 DataLoader workers on each of 8 ranks, and there is room for 0 (64 MiB "
        "of /dev/shm, 147 MiB for each worker): make it larger (docker --shm-size=10g or --ipc=host, "
        "Kubernetes an emptyDir with medium Memory), or set dataloader.worker_shm_mib to what the batches of "
        "one take",
    )
    enough = plan(replace(docker, limits=Limits(shm_kib=10 << 20)), VISION)
    assert (count(enough), enough.warnings) == ([4] * 8, ())


@pytest.mark.parametrize(("gib", "workers"), [(8, 3), (5, 2), (10, 4)])
def test_half_of_the_shared_memory_is_for_workers(gib: int, workers: int) -> None:
    made = plan(replace(LARGE, limits=Limits(shm_kib=gib << 20)), VISION)
    assert count(made) == [workers] * 8


def test_a_process_that_may_open_few_files_has_few_workers() -> None:
    made = plan(replace(LARGE, limits=Limits(files=640)), VISION)
    assert count(made) == [2] * 8
    assert "at most 2 for 640 open files" in tell(made)
    assert "raise the hard limit" in made.warnings[0]
    assert count(plan(replace(LARGE, limits=Limits(files=10)), VISION)) == [1] * 8
    usual = replace(LARGE, limits=Limits(files=1024))
    assert plan(usual, replace(VISION, num_workers=8)).warnings == ()


def test_what_cores_forbid_anyway_is_no_warning() -> None:
    small = replace(convert(describe(["0-1"], [0])), limits=Limits(shm_kib=400 << 10))
    made = plan(small, VISION)
    assert (count(made), made.warnings) == ([1], ())
    assert (
        tell(made)
        == "num_workers=1: dataloader=vision asks for 4; at most 0 for 2 cores and 1 rank, yet at least 1"
    )


def test_the_users_number_stays_and_what_it_takes_is_warned_of() -> None:
    environ = (("LAUNCH_NUM_WORKERS", "64"),)
    made = plan(replace(LARGE, limits=Limits(shm_kib=64 << 10)), replace(VISION, environ=environ))
    assert count(made) == [64] * 8
    assert tell(made).startswith("num_workers=64: LAUNCH_NUM_WORKERS asks for 64; at most 0 for 64 MiB")
    assert "there is room for 0" in made.warnings[0]
    assert "LAUNCH_NUM_WORKERS" not in dict(made.ranks[0].env)


def test_none_asked_for_is_none_and_needs_nothing() -> None:
    made = plan(replace(LARGE, limits=Limits(shm_kib=1)), replace(VISION, workload="none", num_workers=0))
    assert (count(made), made.warnings) == ([0] * 8, ())
    assert tell(made) == "num_workers=0: dataloader=none asks for 0"


def test_the_reason_is_there_where_all_is_well() -> None:
    assert tell(plan(convert(load("dgx-h100")), Request())) == (
        "num_workers=2: dataloader=text asks for 2; at most 12 for 112 cores and 8 ranks"
    )


def test_the_default_of_dataloaders_is_handed_over_when_asked_for() -> None:
    assert "LAUNCH_LOADER_DEFAULT" not in dict(plan(LARGE, Request()).ranks[0].env)
    assert dict(plan(LARGE, Request(loader_default=True)).ranks[0].env)["LAUNCH_LOADER_DEFAULT"] == "1"
    own = Request(loader_default=True, environ=(("LAUNCH_LOADER_DEFAULT", "0"),))
    assert "LAUNCH_LOADER_DEFAULT" not in dict(plan(LARGE, own).ranks[0].env)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_an_amount_that_is_none_is_a_usage_error(value: float) -> None:
    for name, request in (
        ("worker_gib", Request(worker_gib=value)),
        ("worker_shm_mib", Request(worker_shm_mib=value)),
    ):
        with pytest.raises(UsageError, match=f"dataloader.{name}=.* is no amount: give 0 or more"):
            plan(LARGE, request)


def test_the_smallest_amounts_bound_nothing() -> None:
    tight = replace(LARGE, limits=Limits(memory_kib=1 << 40, shm_kib=1 << 40))
    assert count(plan(tight, replace(VISION, worker_gib=5e-324, worker_shm_mib=5e-324))) == [4] * 8


@pytest.mark.parametrize("name", ["text", "vision", "video"])
def test_a_shipped_workload_fits_a_large_machine_whole(name: str) -> None:
    conf = OmegaConf.to_container(OmegaConf.load(CONF / "dataloader" / f"{name}.yaml"))
    assert isinstance(conf, dict)
    limits = Limits(memory_kib=1 << 30, shm_kib=1 << 29, files=1 << 20)
    made = plan(replace(LARGE, limits=limits), Request(**{str(key): value for key, value in conf.items()}))
    assert (count(made), made.warnings) == ([conf["num_workers"]] * 8, ())
    assert conf["worker_gib"] > 2 * conf["worker_shm_mib"] / 1024


@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.integers(-5, 60))
def test_the_level_is_the_largest_that_fits(rooms: list[int], total: int) -> None:
    def take(level: int) -> int:
        return sum(min(level, room) for room in rooms)

    level = level_workers(rooms, total)
    assert level == 0 or take(level) <= total
    assert level >= max(rooms) or take(level + 1) > total


AMOUNTS = st.sampled_from([0.0, 0.1, 3.0, 1e9])


@given(MACHINES, REQUESTS, AMOUNTS, AMOUNTS, st.sampled_from([None, 0, 700, 4096]))
def test_more_than_one_worker_is_never_more_than_there_is_room_for(
    machine: Machine, asked: Request, gib: float, shm: float, files: int | None
) -> None:
    assume(find_usable(machine) and "LAUNCH_NUM_WORKERS" not in dict(asked.environ))
    limits = replace(machine.limits, memory_kib=8 << 20, shm_kib=64 << 10, files=files)
    request = replace(asked, strict=False, workload="ours", worker_gib=gib, worker_shm_mib=shm)
    made = plan(replace(machine, limits=limits), request)
    ranks, usable = len(made.ranks), find_usable(machine)
    cores = len({cpu.core for cpu in machine.cpus if cpu.id in usable})
    time = min(cores, limits.cpus or cores)
    for rank in made.ranks:
        assert min(1, request.num_workers) <= rank.num_workers <= request.num_workers
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


@pytest.mark.parametrize("request_", [Request(num_workers=9), Request(workload="", num_workers=9)], ids=str)
def test_a_number_that_is_given_stays_with_a_warning_where_cores_are_too_few(request_: Request) -> None:
    small = convert(describe(["0-3"], [0]))
    made = plan(small, request_)
    assert count(made) == [9]
    assert tell(made) == "num_workers=9: dataloader.num_workers asks for 9; at most 2 for 4 cores and 1 rank"
    (warning,) = made.warnings
    assert warning.startswith("dataloader.num_workers=9 is more than there are cores for, which is 2 on each")
    assert plan(small, Request(num_workers=9, measured=True)).warnings == ()
    bounded = plan(small, Request(workload="ours", num_workers=9))
    assert (count(bounded), bounded.warnings) == ([2], ())


def test_a_number_that_is_the_workloads_own_is_given_all_the_same() -> None:
    single = convert(describe(["0"], [0]))
    assert count(plan(single, Request(workload="text", num_workers=2))) == [1]
    assert count(plan(single, Request(workload="", num_workers=2))) == [2]


def test_the_workloads_files_say_what_the_rule_says() -> None:
    files = {path.stem: OmegaConf.load(path) for path in (CONF / "dataloader").glob("*.yaml")}
    assert {file.workload: file.num_workers for file in files.values()} == WORKLOADS
    assert set(files) == set(WORKLOADS)
