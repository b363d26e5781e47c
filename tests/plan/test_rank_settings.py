"""Workers, threads and variables of ranks; the user's own variables; strict requests; wrong ones."""

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from launcher.errors import MachineError, UsageError
from launcher.plan.cpu_sets import BINDINGS
from launcher.plan.model import Limits, Plan, Request
from launcher.plan.planner import plan

from .lab_machines import convert, describe, load

CONF = Path(__file__).parent.parent.parent / "conf"
ONE = convert(describe(["0-7"], [0], threads={"none": True}))
ALWAYS = {
    "LAUNCH_GC": "synchronized,warmup=30,every=50",
    "LAUNCH_NUM_WORKERS": "2",
    "OMP_NUM_THREADS": "6",
    "TORCHINDUCTOR_COMPILE_THREADS": "8",
}
"""What a rank with eight cores finds by default."""


def started(made: Plan) -> list[tuple[int, int]]:
    return [(rank.num_workers, rank.omp_num_threads) for rank in made.ranks]


@pytest.mark.parametrize(
    ("cores", "wanted", "workers", "threads"),
    [("0-7", 2, 2, 6), ("0-7", 0, 0, 8), ("0-7", 99, 6, 2), ("0-1", 2, 1, 1), ("0", 2, 1, 1), ("0", 0, 0, 1)],
)
def test_workers_and_threads_share_the_ranks_cores(
    cores: str, wanted: int, workers: int, threads: int
) -> None:
    made = plan(convert(describe([cores], [0])), Request(workload="ours", num_workers=wanted))
    assert started(made) == [(workers, threads)]


def test_idle_cores_take_the_workers_first() -> None:
    machine = convert(load("dgx-a100"))
    assert started(plan(machine, Request(num_workers=2)))[0] == (2, 8)
    assert started(plan(machine, Request(num_workers=10)))[0] == (10, 6)


def test_ranks_that_share_cpus_count_their_part_of_them() -> None:
    made = plan(convert(load("dgx-h100")), Request(binding="numa"))
    assert started(made) == [(2, 12)] * 8


def test_a_rank_with_a_gpu_gets_its_variables_in_order() -> None:
    env = plan(ONE, Request()).ranks[0].env
    assert list(env) == sorted(env)
    expandable = "expandable_segments:True"
    assert dict(env) == ALWAYS | {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTORCH_ALLOC_CONF": expandable,
        "PYTORCH_CUDA_ALLOC_CONF": expandable,
    }


def test_a_rank_without_a_gpu_gets_no_cuda_variable() -> None:
    env = dict(plan(replace(ONE, gpus=()), Request()).ranks[0].env)
    assert env == ALWAYS


def test_own_devices_are_named_by_uuid_within_what_the_user_shows() -> None:
    machine = convert(describe(["0-7"], [0, 0, 0]))
    environ = (("CUDA_VISIBLE_DEVICES", "2,0"),)
    made = plan(machine, Request(devices="own", environ=environ))
    shown = [dict(rank.env)["CUDA_VISIBLE_DEVICES"] for rank in made.ranks]
    assert shown == ["GPU-00000002-aaaa", "GPU-00000000-aaaa"]


def test_a_permutation_moves_each_rank_to_its_own_gpu() -> None:
    machine = convert(describe(["0-3", "4-7"], [0, 1]))
    made = plan(machine, Request(environ=(("CUDA_VISIBLE_DEVICES", "1,0"),)))
    assert [rank.gpu.index for rank in made.ranks if rank.gpu] == [1, 0]
    assert [min(rank.cpus) for rank in made.ranks] == [4, 0]


def test_no_visible_device_means_ranks_by_numa_node() -> None:
    machine = convert(describe(["0-3", "4-7"], [0, 0, 0]))
    made = plan(machine, Request(environ=(("CUDA_VISIBLE_DEVICES", ""),)))
    assert [(rank.gpu, min(rank.cpus)) for rank in made.ranks] == [(None, 0), (None, 4)]


@pytest.mark.parametrize(
    ("name", "value", "attribute", "number"),
    [
        ("OMP_NUM_THREADS", "3", "omp_num_threads", 3),
        ("OMP_NUM_THREADS", "5,2", "omp_num_threads", 5),
        ("LAUNCH_NUM_WORKERS", "0", "num_workers", 0),
        ("LAUNCH_NUM_WORKERS", "12", "num_workers", 12),
        ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "num_workers", 2),
        ("CUDA_VISIBLE_DEVICES", "0", "num_workers", 2),
    ],
)
def test_a_variable_of_the_users_is_kept(name: str, value: str, attribute: str, number: int) -> None:
    rank = plan(ONE, Request(environ=((name, value),))).ranks[0]
    assert name not in dict(rank.env)
    assert f"{name}={value} kept, set by the user" in rank.notes
    assert getattr(rank, attribute) == number


@pytest.mark.parametrize("value", ["zero", "-1", "0", "1" * 5000, "²"])
def test_a_number_of_threads_that_is_none_is_replaced_with_a_warning(value: str) -> None:
    made = plan(ONE, Request(environ=(("OMP_NUM_THREADS", value),)))
    assert dict(made.ranks[0].env)["OMP_NUM_THREADS"] == "6"
    assert "is no number from 1 on" in made.warnings[0]


def test_an_empty_variable_is_as_good_as_unset() -> None:
    made = plan(ONE, Request(environ=(("OMP_NUM_THREADS", ""), ("CUDA_DEVICE_ORDER", ""))))
    assert made == plan(ONE, Request())


def test_mig_instances_need_own_devices() -> None:
    machine = replace(ONE, gpus=(replace(ONE.gpus[0], mig=("MIG-a", "MIG-b")),))
    made = plan(machine, Request())
    assert [rank.gpu.uuid for rank in made.ranks if rank.gpu] == ["MIG-a", "MIG-b"]
    assert "set devices=own" in made.warnings[0]
    assert plan(machine, Request(devices="own")).warnings == ()


def test_an_order_that_may_differ_from_the_plans_is_a_warning_for_unlike_gpus() -> None:
    machine = convert(describe(["0-7"], [0, 0]))
    unlike = replace(machine, gpus=(machine.gpus[0], replace(machine.gpus[1], name="other")))
    request = Request(environ=(("CUDA_DEVICE_ORDER", "FASTEST_FIRST"),))
    assert plan(machine, request).warnings == ()
    assert "CUDA_DEVICE_ORDER=FASTEST_FIRST" in plan(unlike, request).warnings[0]


def test_what_the_probe_warned_of_comes_first() -> None:
    assert plan(replace(ONE, warnings=("odd",)), Request(3)).warnings[0] == "odd"


def with_quota(name: str, cpus: float | None) -> Plan:
    return plan(
        replace(convert(load(name)), limits=Limits(cpus=cpus)), Request(workload="ours", num_workers=4)
    )


@pytest.mark.parametrize(
    ("quota", "workers", "threads"),
    [(None, 4, 10), (112, 4, 10), (64, 4, 4), (32, 2, 2), (12, 1, 1), (0.5, 1, 1)],
)
def test_a_quota_bounds_workers_and_threads_and_not_masks(
    quota: float | None, workers: int, threads: int
) -> None:
    made = with_quota("dgx-h100", quota)
    assert started(made) == [(workers, threads)] * 8
    assert [rank.cpus for rank in made.ranks] == [rank.cpus for rank in with_quota("dgx-h100", None).ranks]
    assert len(made.warnings) == (quota is not None and quota < 112)
    assert ("CPUs of time" in made.ranks[0].notes[1]) == (quota is not None and quota < 112)


def test_a_quota_that_is_too_small_is_one_warning_with_its_fix() -> None:
    (warning,) = with_quota("dgx-h100", 32).warnings
    assert "the time of 32 CPUs, on 112 cores" in warning
    assert "within 4 for each of 8 ranks: raise the CPU limit (resources.limits.cpu in Kubernetes)" in warning


def test_a_quota_leaves_spare_cores_to_workers_where_it_reaches_so_far() -> None:
    assert started(with_quota("dgx-a100", 128)) == [(4, 8)] * 8
    assert started(with_quota("dgx-a100", 80)) == [(4, 6)] * 8


def test_strict_makes_a_shortfall_an_error() -> None:
    machine = convert(describe(["0-1"], []))
    with pytest.raises(MachineError, match=r"local rank 0-2 must share 2 cores \(CPUs 0-1\).*: ask for"):
        plan(machine, Request(3, strict=True))
    assert plan(machine, Request(2, strict=True)).warnings == ()
    assert len(plan(machine, Request(3, binding="none", strict=True)).ranks) == 3


@pytest.mark.parametrize(
    "request_",
    [
        Request(0),
        Request(-3),
        Request(binding="exklusive"),
        Request(devices="some"),
        Request(reserve_cores=-1),
        Request(num_workers=-1),
    ],
)
def test_a_request_that_means_nothing_is_a_usage_error(request_: Request) -> None:
    with pytest.raises(UsageError, match=r": (use|give) "):
        plan(ONE, request_)


def test_a_job_without_cpus_is_a_machine_error() -> None:
    with pytest.raises(MachineError, match="none of the online CPUs"):
        plan(replace(ONE, allowed_cpus=frozenset()), Request())


def test_the_shipped_bindings_are_the_planners() -> None:
    files = {path.stem: OmegaConf.load(path) for path in (CONF / "binding").glob("*.yaml")}
    assert {name: conf.policy for name, conf in files.items()} == {name: name for name in BINDINGS}
    assert {(conf.strict, conf.reserve_cores) for conf in files.values()} == {(False, 0)}


def test_the_shipped_workloads_ask_for_the_books_numbers() -> None:
    files = {path.stem: OmegaConf.load(path) for path in (CONF / "dataloader").glob("*.yaml")}
    assert {name: conf.num_workers for name, conf in files.items()} == {
        "none": 0,
        "text": 2,
        "vision": 4,
        "video": 8,
    }
    assert all(conf.workload == name for name, conf in files.items())


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("synchronised", "there is no policy 'synchronised'"),
        ("synchronized,every=abc", "'every=abc' is neither"),
        ("frozen,warmup=-1", "'warmup=-1' is neither"),
        ("disabled,evry=5", "'evry=5' is neither"),
    ],
)
def test_a_policy_that_no_interpreter_would_take_is_warned_of(value: str, fault: str) -> None:
    (warning,) = plan(convert(describe(["0-3"], [0])), Request(environ=(("LAUNCH_GC", value),))).warnings
    assert warning.startswith(f"LAUNCH_GC={value}: {fault}")


@pytest.mark.parametrize("value", ["", "default", "disabled,every=0", "synchronized,warmup=5,every=9,log"])
def test_a_policy_of_the_users_is_kept_in_silence(value: str) -> None:
    assert plan(convert(describe(["0-3"], [0])), Request(environ=(("LAUNCH_GC", value),))).warnings == ()
