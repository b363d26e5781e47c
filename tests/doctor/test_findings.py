"""Each check on a tree that is spoilt in one way: the finding with its values, a reason and a fix."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.doctor.healthy_tree import (
    NEAR,
    SHM,
    clock,
    limits,
    list_links,
    meminfo,
    pick,
    run_doctor,
    write_healthy,
)
from tests.probe.machine_trees import CPU, GPUS, PCI, STATUS, short_lived, spoilt

HUGE = "sys/kernel/mm/hugepages/hugepages-1048576kB"
THP = "sys/kernel/mm/transparent_hugepage"
JOB = "sys/fs/cgroup/job"
FAR = {f"proc/irq/{irq}/{kind}_affinity_list": "20" for irq in (108, 109) for kind in ("effective", "smp")}


@dataclass(frozen=True)
class Bad:
    """A change to the healthy tree and what the doctor must say of it."""

    level: str
    subject: str
    parts: tuple[str, ...]
    edits: Mapping[str, str | bytes | None]


def allow(cpus: str, mems: str = "0-1", more: str = "") -> dict[str, str | bytes | None]:
    return {STATUS: f"Name:\tx\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n{more}"}


CASES = {
    "a node's CPUs in part": Bad(
        "note", "CPUs", ("16 of 32 CPUs of NUMA node 0", "GPU 0, 1"), allow("0-7,16-39,48-63")
    ),
    "a node without CPUs": Bad("warning", "placement", ("local rank 0-1", "16-31,48-63"), allow(NEAR[1])),
    "cores cut": Bad("warning", "CPUs", ("1 core cut in two", "CPUs 35"), allow("0-34,36-63")),
    "one thread of each core": Bad("note", "CPUs", ("32 cores cut in two", "CPUs 32-63"), allow("0-31")),
    "memory barred": Bad("warning", "CPUs", ("CPUs of NUMA node 1", "memory of 0"), allow("0-63", "0")),
    "too few cores": Bad(
        "warning", "CPUs", ("4 cores for 4 ranks and 8", "14 wanted"), allow("0-1,16-17,32-33,48-49")
    ),
    "isolated": Bad("note", "CPUs", ("CPUs 3 are isolated",), {f"{CPU}/isolated": "3"}),
    "quota": Bad("warning", "CPUs", ("quota is 7.5 CPUs, for 64 CPUs",), {f"{JOB}/cpu.max": "750000 100000"}),
    "balancing": Bad(
        "warning", "memory", ("kernel.numa_balancing=1",), {"proc/sys/kernel/numa_balancing": "1"}
    ),
    "reclaim": Bad("warning", "memory", ("vm.zone_reclaim_mode=1",), {"proc/sys/vm/zone_reclaim_mode": "1"}),
    "reserved": Bad(
        "warning",
        "memory",
        ("100 GiB are reserved",),
        {f"{HUGE}/nr_hugepages": "120", f"{HUGE}/free_hugepages": "100"},
    ),
    "thp never": Bad("note", "memory", ("never",), {f"{THP}/enabled": "always madvise [never]"}),
    "thp defrag": Bad(
        "note", "memory", ("defrag=always",), {f"{THP}/defrag": "[always] defer defer+madvise madvise never"}
    ),
    "swapped": Bad("note", "memory", ("2 GiB of swap", "swappiness=10"), {"proc/meminfo": meminfo(6 << 20)}),
    "node unknown": Bad(
        "warning",
        "GPUs",
        ("NUMA node of GPU 1 is unknown", "there are 2"),
        {f"{PCI}/0000:47:00.0/numa_node": "-1", f"{PCI}/0000:47:00.0/local_cpulist": None},
    ),
    "link": Bad(
        "warning",
        "GPUs",
        ("GPU 2 has a PCI link of x8", "x16"),
        {f"{PCI}/0000:87:00.0/current_link_width": "8"},
    ),
    "shm": Bad("warning", "limits", ("/dev/shm has 64 MiB",), {"proc/mounts": SHM.format(size="65536k")}),
    "files": Bad(
        "warning",
        "limits",
        ("may open 2048 files",),
        {"proc/self/limits": limits(files="1024", files_hard="2048")},
    ),
    "locked": Bad(
        "warning", "limits", ("lock 8 MiB", "mlx5_0"), {"proc/self/limits": limits(locked="8388608")}
    ),
    "processes": Bad(
        "warning", "limits", ("ulimit -u) may have 512", "792"), {"proc/self/limits": limits(nproc="512")}
    ),
    "pids": Bad("warning", "limits", ("pids.max) may have 300", "792"), {f"{JOB}/pids.max": "300"}),
    "powersave": Bad(
        "warning", "clocks", ("powersave (acpi-cpufreq) on CPUs 0-63",), clock("acpi-cpufreq", "powersave")
    ),
    "schedutil": Bad("warning", "clocks", ("schedutil (acpi-cpufreq)",), clock("acpi-cpufreq", "schedutil")),
    "passive": Bad("warning", "clocks", ("powersave (intel_cpufreq)",), clock("intel_cpufreq", "powersave")),
    "sparing": Bad(
        "warning",
        "clocks",
        ("powersave (intel_pstate, balance_power)",),
        clock("intel_pstate", "powersave", "balance_power"),
    ),
    "eager": Bad(
        "note",
        "clocks",
        ("powersave (amd-pstate-epp, balance_performance)",),
        clock("amd-pstate-epp", "powersave", "balance_performance"),
    ),
    "fixed": Bad("note", "clocks", ("userspace",), clock("acpi-cpufreq", "userspace")),
    "interrupts": Bad(
        "warning", "interrupts", ("2 of 2 interrupts of mlx5_0, on NUMA node 0", "CPUs 20 of other"), FAR
    ),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_found_with_its_values(healthy: Path, name: str) -> None:
    bad = CASES[name]
    with spoilt(healthy, bad.edits):
        done, findings = run_doctor(healthy)
    found = [finding for finding in pick(findings, bad.level) if finding["subject"] == bad.subject]
    hits = [finding for finding in found if all(part in finding["what"] for part in bad.parts)]
    assert len(hits) == 1, found
    for finding in pick(findings, "error", "warning", "note"):
        assert finding["why"], finding
        assert finding["fix"], finding
    assert done.code == int(bool(pick(findings, "error", "warning")))
    assert done.code == (bad.level == "warning"), pick(findings, "error", "warning")


GOOD: dict[str, Mapping[str, str | bytes | None]] = {
    "processor's own powersave": clock("intel_pstate", "powersave", "performance"),
    "locked memory with CAP_IPC_LOCK": {
        "proc/self/limits": limits(locked="8388608"),
        **allow("0-63", "0-1", "CapEff:\t0000000000004000"),
    },
    "one far interrupt of two": {"proc/irq/108/effective_affinity_list": "20"},
    "an unknown link width": list_links("63"),
    "few reserved pages": {f"{HUGE}/nr_hugepages": "1", f"{HUGE}/free_hugepages": "1"},
    "a quota that is no limit": {f"{JOB}/cpu.max": "6400000 100000"},
    "a little swap": {"proc/meminfo": meminfo((8 << 20) - 1024)},
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", GOOD)
def test_what_looks_wrong_and_is_not_passes(healthy: Path, name: str) -> None:
    with spoilt(healthy, GOOD[name]):
        done, findings = run_doctor(healthy)
    assert not pick(findings, "error", "warning", "note")
    assert done.code == 0


@pytest.mark.usefixtures("here")
def test_devices_that_are_not_there_are_found(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,9")
    done, findings = run_doctor(healthy)
    (warning,) = pick(findings, "error", "warning")
    assert "CUDA_VISIBLE_DEVICES" in warning["what"] + warning["fix"]
    assert "1 of 4 used: NVIDIA A100-SXM4-40GB" in [finding["what"] for finding in findings]
    assert done.code == 1


@pytest.mark.usefixtures("here")
def test_a_machine_of_one_node_has_nothing_to_balance() -> None:
    node = [{"id": 0, "package": 0, "cpus": "0-31", "gib": 64}]
    with short_lived() as folder:
        root = write_healthy(folder / "root", numa=node, threads={"none": True}, gpus=[], nics=[])
        with spoilt(root, {"proc/sys/kernel/numa_balancing": "1", "proc/self/limits": limits(locked="1")}):
            done, findings = run_doctor(root, "nproc_per_node=2")
    assert done.code == 0
    assert not pick(findings, "error", "warning", "note")
    assert not [finding for finding in findings if "locked" in finding["what"]]


@pytest.mark.usefixtures("here")
def test_files_that_are_not_there_are_told_as_not_checked() -> None:
    from tests.doctor.healthy_tree import HEALTHY

    with short_lived() as folder:
        root = write_healthy(folder / "root")
        with spoilt(root, dict.fromkeys(HEALTHY) | {GPUS: None}):
            done, findings = run_doctor(root, "nproc_per_node=4")
    unknown = " ".join(finding["what"] for finding in pick(findings, "unknown"))
    for what in ("NUMA balancing", "transparent huge pages", "swap", "/dev/shm", "open files", "frequency"):
        assert f"{what} not checked" in unknown
    assert not pick(findings, "error", "note")
    assert done.code == 1, "MemTotal is missing, which the probe tells"
