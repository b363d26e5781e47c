"""Captured trees without proc/self/status: what the cpuset's own files say may be used."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.cpulist import format_cpulist
from launcher.plan.model import Machine
from launcher.probe.machine import probe

from .machine_trees import STATUS, put, write_small

TOP = "sys/fs/cgroup"
OWN, NAME = "proc/self/cgroup", "proc/self/cpuset"
V1, V2 = f"{TOP}/cpuset", f"{TOP}/cgroup.controllers"

CAPTURES: dict[str, Mapping[str, str | bytes]] = {
    "version 1": {
        OWN: "4:memory:/slurm\n3:cpuset:/slurm/job_7\n0::/init.scope",
        f"{V1}/slurm/job_7/cpuset.cpus": "2-3,10",
        f"{V1}/slurm/job_7/cpuset.mems": "1",
        f"{V1}/slurm/cpuset.cpus": "0-7",
        f"{V1}/slurm/cpuset.mems": "0-3",
    },
    "version 1 with what is effective": {
        OWN: "3:cpuset:/job",
        f"{V1}/job/cpuset.cpus": "2-3,10-11",
        f"{V1}/job/cpuset.effective_cpus": "2-3,10",
        f"{V1}/job/cpuset.mems": "0-1",
        f"{V1}/job/cpuset.effective_mems": "1",
    },
    "version 2, the controller enabled above": {
        OWN: "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
        V2: "cpuset cpu",
        f"{TOP}/system.slice/slurmstepd.scope/job_7/step_0/user/task_0/cgroup.procs": "1",
        f"{TOP}/system.slice/slurmstepd.scope/job_7/cpuset.cpus.effective": "2-3,10",
        f"{TOP}/system.slice/slurmstepd.scope/job_7/cpuset.mems.effective": "1",
        f"{TOP}/cpuset.cpus.effective": "0-15",
        f"{TOP}/cpuset.mems.effective": "0-3",
    },
    "version 2 with empty lists of its own": {
        OWN: "0::/job",
        V2: "cpuset cpu",
        f"{TOP}/job/cpuset.cpus": "",
        f"{TOP}/job/cpuset.mems": "",
        f"{TOP}/job/cpuset.cpus.effective": "2-3,10",
        f"{TOP}/job/cpuset.mems.effective": "1",
    },
    "proc/self/cpuset alone, version 1": {
        NAME: "/job",
        f"{V1}/job/cpuset.cpus": "2-3,10",
        f"{V1}/job/cpuset.mems": "1",
    },
    "proc/self/cpuset alone, version 2": {
        NAME: "/job",
        V2: "cpuset",
        f"{TOP}/job/cpuset.cpus.effective": "2-3,10",
        f"{TOP}/job/cpuset.mems.effective": "1",
    },
    "proc/self/cgroup without the controller": {
        OWN: "4:memory:/elsewhere",
        NAME: "/job",
        f"{V1}/job/cpuset.cpus": "2-3,10",
        f"{V1}/job/cpuset.mems": "1",
    },
    "a container that sees the host's names": {
        OWN: "3:cpuset:/docker/abc",
        "proc/self/mountinfo": f"36 35 0:31 /docker/abc /{V1} rw - cgroup cgroup rw,cpuset",
        f"{V1}/cpuset.cpus": "2-3,10",
        f"{V1}/cpuset.mems": "1",
    },
    "a hierarchy elsewhere, by /proc/mounts": {
        OWN: "0::/job",
        "proc/mounts": "none /cgroups cgroup2 rw 0 0",
        "cgroups/job/cpuset.cpus.effective": "2-3,10",
        "cgroups/job/cpuset.mems.effective": "1",
    },
}


def capture(root: Path, files: Mapping[str, str | bytes]) -> Machine:
    """The machine of a captured tree with these files, and without proc/self/status."""
    write_small(root)
    (root / STATUS).unlink()
    for path, content in files.items():
        put(root, path, content)
    return probe(root)


def may_use(machine: Machine) -> tuple[str, str]:
    """The CPUs and memory nodes that the job may use."""
    return format_cpulist(machine.allowed_cpus), format_cpulist(machine.allowed_mems)


@pytest.mark.parametrize("name", CAPTURES)
def test_the_cpusets_files_say_what_may_be_used(name: str, tmp_path: Path) -> None:
    machine = capture(tmp_path, CAPTURES[name])
    assert may_use(machine) == ("2-3,10", "1")
    assert machine.warnings == ()


WITHOUT: dict[str, Mapping[str, str | bytes]] = {
    "no file": {},
    "a cgroup that is not there": {OWN: "3:cpuset:/gone", NAME: "/gone"},
    "garbage": {OWN: "3:cpuset:/job", f"{V1}/job/cpuset.cpus": "all", f"{V1}/job/cpuset.mems": "?"},
    "a way out of the tree": {OWN: "0::/../../etc", NAME: "/../job", "proc/job/cpuset.cpus": "0"},
}


@pytest.mark.parametrize("name", WITHOUT)
def test_all_is_used_with_a_warning_where_they_say_nothing(name: str, tmp_path: Path) -> None:
    machine = capture(tmp_path, WITHOUT[name])
    assert may_use(machine) == ("0-15", "0-3")
    assert "Cpus_allowed_list of proc/self/status is missing" in machine.warnings[0]
    assert "every NUMA node's memory is used" in machine.warnings[1]


def test_what_status_says_comes_first_and_each_list_counts_by_itself(tmp_path: Path) -> None:
    files = {**CAPTURES["version 1"], STATUS: "Cpus_allowed_list:\t4-5"}
    machine = capture(tmp_path, files)
    assert may_use(machine) == ("4-5", "1")


def test_cpus_of_the_cpuset_that_are_not_online_are_left_out(tmp_path: Path) -> None:
    job = f"{V1}/job/cpuset.cpus"
    assert capture(tmp_path, {OWN: "3:cpuset:/job", job: "14-99"}).allowed_cpus == {14, 15}
    put(tmp_path, job, "98-99")
    (warning, *_) = probe(tmp_path).warnings
    assert warning.startswith("no CPU of the cpuset (98-99) is in sys/devices/system/cpu/online ('0-15')")
