"""Checks on values that no other machine's files hold: GPU memory, NVML, the environment, the trial."""

from dataclasses import replace
from typing import Any

import pytest

from launcher.doctor.checkup import choose_exit_code, run_checks
from launcher.doctor.device_checks import judge_devices, judge_persistence
from launcher.doctor.facts import CAP_SYS_RESOURCE, Ceiling, Health
from launcher.doctor.finding import BindingTrial, Case, Finding
from launcher.doctor.limit_checks import judge_files, judge_processes, judge_shm
from launcher.doctor.memory_checks import judge_size
from launcher.doctor.placement_checks import judge_binding_trial, judge_environment, judge_plan
from launcher.plan.model import Cpu, Gpu, Limits, Machine, NumaNode, Request
from launcher.plan.planner import plan

GPUS = tuple(
    Gpu(index, f"GPU-{index}", f"0000:0{index}:00.0", 0, memory_mib=80 << 10, name="H100") for index in (0, 1)
)
MACHINE = Machine(
    cpus=tuple(Cpu(cpu, cpu, 0, 0, 0) for cpu in range(16)),
    nodes=(NumaNode(0, 256 << 20, True, ((0, 10),)),),
    gpus=GPUS,
    allowed_cpus=frozenset(range(16)),
    allowed_mems=frozenset({0}),
    memory_kib=256 << 20,
)
PCI = tuple(gpu.pci for gpu in GPUS)


def make_case(machine: Machine = MACHINE, **values: Any) -> Case:
    """A case about the running machine."""
    health = values.pop("health", Health(live=True))
    return Case(plan(machine, Request()), health, values.pop("trial", BindingTrial(2)), **values)


def only(findings: Any) -> Finding:
    """The one finding of a check."""
    (finding,) = findings
    assert isinstance(finding, Finding)
    return finding


def test_main_memory_is_held_against_the_gpus() -> None:
    enough = only(judge_size(make_case()))
    assert (enough.level, enough.what) == ("ok", "256 GiB of main memory, 160 GiB on the GPUs")
    limited = replace(MACHINE, limits=Limits(memory_kib=128 << 20))
    short = only(judge_size(make_case(limited)))
    assert short.level == "warning"
    assert short.what == (
        "128 GiB of main memory (the cgroup's limit), less than the 160 GiB of the job's 2 GPUs"
    )


def test_a_gpus_own_node_is_no_main_memory() -> None:
    nodes = (NumaNode(0, 64 << 20, True, ((0, 10),)), NumaNode(1, 192 << 20, False, ((1, 10),)))
    assert only(judge_size(make_case(replace(MACHINE, nodes=nodes)))).level == "warning"


@pytest.mark.parametrize(
    ("shown", "level", "part"),
    [
        (PCI, "ok", "2 of 2 used: H100"),
        (None, "ok", "2 of 2 used: H100"),
        ((*PCI, "0000:09:00.0"), "note", "has 3 GPUs, and 2 can be opened: not 0000:09:00.0"),
        (PCI[:1], "note", "NVML shows 0000:01:00.0"),
    ],
)
def test_nvml_is_held_against_the_driver(shown: tuple[str, ...] | None, level: str, part: str) -> None:
    finding = only(judge_devices(make_case(health=Health(live=True, driver_gpus=shown))))
    assert (finding.level, part in finding.what) == (level, True), finding


def test_a_driver_whose_gpus_cannot_be_opened_is_a_warning() -> None:
    case = make_case(replace(MACHINE, gpus=()), health=Health(live=True, driver_gpus=PCI))
    assert only(judge_devices(case)).level == "warning"


def test_persistence_mode() -> None:
    on, off = tuple((pci, True) for pci in PCI), ((PCI[0], True), (PCI[1], False))
    assert only(judge_persistence(make_case(health=Health(live=True, persistence=on)))).level == "ok"
    finding = only(judge_persistence(make_case(health=Health(live=True, persistence=off))))
    assert (finding.level, finding.what) == ("note", "persistence mode of GPU 1 is off")
    assert only(judge_persistence(make_case())).level == "unknown"


def test_shared_memory_that_is_nearly_full() -> None:
    machine = replace(MACHINE, limits=Limits(shm_kib=8 << 20))
    full = only(judge_shm(make_case(machine, health=Health(live=True, shm_free_kib=1024))))
    assert (full.level, full.what) == ("warning", "/dev/shm has 8 GiB, of which 1 MiB are free")
    free = only(judge_shm(make_case(machine, health=Health(live=True, shm_free_kib=4 << 20))))
    assert (free.level, free.what) == ("ok", "/dev/shm: 8 GiB, 4 GiB free")


@pytest.mark.parametrize(("hard", "level"), [(None, "ok"), (1 << 20, "ok"), (4096, "ok"), (2048, "warning")])
def test_open_files_are_judged_by_the_hard_limit_which_ranks_are_given(hard: int | None, level: str) -> None:
    finding = only(judge_files(make_case(health=Health(live=True, files=Ceiling(1024, hard)))))
    assert finding.level == level
    assert ("unlimited" if hard is None else str(hard)) in finding.what
    assert ("limits.conf" in finding.fix) == (level == "warning")


def test_root_is_not_held_to_the_users_processes() -> None:
    low = Health(live=True, processes=Ceiling(10, 10))
    assert only(judge_processes(make_case(health=low))).level == "warning"
    able = replace(low, capabilities=1 << CAP_SYS_RESOURCE)
    assert only(judge_processes(make_case(health=able))).level == "ok"


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, "ok"),
        ({"OMP_PROC_BIND": "true"}, "warning"),
        ({"OMP_PROC_BIND": "FALSE"}, "ok"),
        ({"OMP_PLACES": "cores"}, "warning"),
        ({"OMP_PLACES": "cores", "OMP_PROC_BIND": "false"}, "ok"),
        ({"GOMP_CPU_AFFINITY": "0-3"}, "warning"),
        ({"GOMP_CPU_AFFINITY": "0"}, "warning"),
        ({"GOMP_CPU_AFFINITY": ""}, "ok"),
        ({"KMP_AFFINITY": "granularity=fine,compact"}, "warning"),
        ({"KMP_AFFINITY": "disabled"}, "ok"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warning"),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, "ok"),
        ({"NCCL_P2P_DISABLE": "1"}, "note"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "note"),
        ({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, "ok"),
    ],
)
def test_variables_that_slow_jobs_down(environ: dict[str, str], level: str) -> None:
    finding = only(judge_environment(make_case(environ=environ)))
    assert finding.level == level
    if level != "ok":
        assert finding.fix.startswith("unset ")


def test_what_the_kernel_refuses_is_told_with_the_fix() -> None:
    refused = "memory policy preferred of node 0 was refused ([Errno 1] Operation not permitted): memory …"
    finding = only(judge_binding_trial(make_case(trial=BindingTrial(2, (refused,)))))
    assert (finding.level, finding.what) == ("warning", refused)
    assert "--cap-add=SYS_NICE" in finding.fix
    assert only(judge_binding_trial(make_case())).level == "ok"
    untried = only(judge_binding_trial(make_case(trial=BindingTrial(reason="no room in /tmp"))))
    assert (untried.level, untried.what) == ("unknown", "permission to bind not checked: no room in /tmp")


def test_the_plans_warnings_are_findings() -> None:
    odd = replace(MACHINE, warnings=("cpulist of node 1 is missing: taken as empty",))
    case = make_case(odd)
    case = replace(case, plan=replace(case.plan, warnings=(*odd.warnings, "too few cores: ask for more")))
    probed, planned = judge_plan(case)
    assert probed.what == odd.warnings[0]
    assert (planned.what, planned.fix) == ("too few cores", "ask for more")


def test_errors_and_warnings_alone_make_the_exit_code() -> None:
    for level, code in {"ok": 0, "unknown": 0, "note": 0, "warning": 1, "error": 1}.items():
        assert choose_exit_code((Finding("ok", "a", "b"), Finding(level, "a", "b"))) == code
    assert choose_exit_code(run_checks(make_case(environ={}))) == 0
