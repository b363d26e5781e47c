"""The facts of this machine, and real faults: full, small and stuck file systems, a stopped child."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from launcher.codec import convert
from launcher.doctor.job import judge_nodes
from launcher.doctor.model import Facts, Wanted
from launcher.probe.node import read_node_facts
from tests.probe.in_namespace import run_in_namespace
from tests.probe.machine_trees import put

GIB = 1 << 20


def list_bad(facts: Facts, settings: Wanted | None = None) -> list[tuple[str, str]]:
    """Errors and warnings of a node by itself, but for what others do on its CPUs during the tests."""
    found = judge_nodes((replace(facts, load=None),), settings)
    return [(one.level, one.what) for one in found if one.level in ("error", "warning")]


def test_this_machine_is_read_and_nothing_is_invented(tmp_path: Path) -> None:
    before = time.time()
    facts = read_node_facts("/", [(str(tmp_path), "run directory"), ("/", "data")], host="here")
    assert (facts.host, facts.node_rank) == ("here", 0)
    assert before <= facts.time <= time.time()
    assert facts.cpus == len(os.sched_getaffinity(0))
    assert facts.memory_kib > (facts.free_memory_kib or 0) > 0
    assert facts.load is not None and 0 <= facts.load <= 1
    assert [path.state for path in facts.paths] == ["ok", "ok"]
    assert (facts.paths[0].free_kib or 0) > 0
    assert facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert list(tmp_path.iterdir()) == [], "nothing is left of the trial"
    assert list_bad(replace(facts, shm_kib=None), Wanted(min_free_kib=1024)) == []  # in a container
    assert convert(Facts, json.loads(json.dumps(asdict(facts)))) == facts


def test_full_and_small_file_systems_are_found(tmp_path: Path) -> None:
    """Real ones: one is filled to the last block, another has one inode left and then none."""
    told = run_in_namespace(
        """
mount_tmpfs(folder / "full", "size=1m")
mount_tmpfs(folder / "inodes", "size=64m,nr_inodes=3")
mount_tmpfs(folder / "tight", "size=600m")
(folder / "inodes/a").touch()
(folder / "inodes/b").touch()
with open(folder / "full/log", "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
subprocess.run(["mount", "-o", "bind,ro", str(folder / "tight"), str(folder / "tight")], check=True)
mount_tmpfs(folder / "small", "size=600m")
uses = {"full": "run directory", "inodes": "checkpoints", "tight": "temporary directory"}
paths = [(str(folder / name), use) for name, use in uses.items()] + [(str(folder / "small"), "checkpoints")]
mount_tmpfs("/dev/shm", "size=64m")
small_shm = read_node_facts("/", paths)
os.posix_fallocate(os.open("/dev/shm/nccl-left", os.O_CREAT | os.O_RDWR), 0, 60 << 20)
print(json.dumps([asdict(small_shm), asdict(read_node_facts())]))
""",
        tmp_path,
    )
    facts, full_shm = (convert(Facts, one) for one in told)
    assert [path.state for path in facts.paths] == ["failed", "failed", "read_only", "ok"]
    assert list_bad(facts) == [
        ("error", f"{tmp_path}/full (run directory): No space left on device (0 KiB free)"),
        ("error", f"{tmp_path}/inodes (checkpoints): No space left on device (64 MiB free)"),
        ("error", f"{tmp_path}/tight (temporary directory) is on a read-only file system"),
        ("warning", f"{tmp_path}/small (checkpoints) has 600 MiB free, less than 1 GiB"),
        ("warning", "/dev/shm has 64 MiB"),
    ]
    assert list_bad(full_shm) == [("error", "/dev/shm has 64 MiB, of which 4 MiB are free")]


STUCK = """
device = mount_stuck(folder / "nfs", reads={reads})
paths = [(str(folder / "nfs"), "data"), (str(folder / "nfs/x"), "run directory"), ("/", "data")]
facts = read_node_facts("/", paths, patience=3)
children = pathlib.Path(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read_text().split()
states = [pathlib.Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[0] for pid in children]
os.close(device)
print(json.dumps([asdict(facts), states]), flush=True)
os._exit(0)  # It has a thread that waits for requests.
"""


@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="there is no FUSE")
@pytest.mark.parametrize("reads", [False, True])
def test_a_stuck_file_system_costs_its_time_limit_even_if_who_waits_cannot_be_killed(
    tmp_path: Path, reads: bool
) -> None:
    """As NFS hangs: the children wait in the kernel, in the second case in state D, which SIGKILL leaves."""
    told, states = run_in_namespace(STUCK.format(reads=reads), tmp_path)
    facts = convert(Facts, told)
    assert [path.state for path in facts.paths] == ["stuck", "stuck", "ok"]
    # One that is killed may come to its end after it was to be reaped.
    assert [state for state in states if state != "Z"] == (["D", "D"] if reads else [])
    assert list_bad(facts) == [
        ("error", f"{tmp_path}/nfs (data): no answer in 3 s"),
        ("error", f"{tmp_path}/nfs/x (run directory): no answer in 3 s"),
    ]


def test_paths_that_are_missing_or_closed_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    os.mkfifo(tmp_path / "fifo")
    states = {
        (str(tmp_path / "none"), "data"): "missing",
        (str(file / "x"), "data"): "missing",
        (str(file), "data"): "ok",
        (str(tmp_path / "fifo"), "data"): "ok",
        (str(file), "run directory"): "missing",
        ("a\0b", "data"): "failed",
        ("/proc", "run directory"): "missing",
    }
    facts = read_node_facts("/", list(states))
    assert {(path.path, path.purpose): path.state for path in facts.paths} == states


def test_a_driver_that_stops_dies_or_fails_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    """NVML is asked in a child."""

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def refuse() -> None:
        os.write(1, b"nobody reads this\n")
        raise PermissionError(13, "no")

    problems = {}
    for act in (stop, die, refuse):
        nvml: Any = ModuleType("pynvml_made_up")
        nvml.nvmlInit, nvml.NVMLError = act, ArithmeticError
        patience = 2.0 if act is stop else 60.0
        facts = read_node_facts("/", [(str(tmp_path), "data")], nvml=nvml, patience=patience)
        problems[act] = next(one.reason for one in facts.unchecked if one.check == "gpus")
        assert facts.paths[0].state == "ok" and facts.memory_kib > 0
    assert problems == {
        stop: "NVML: no answer in 2 s",
        die: "NVML: its process ended with signal 11",
        refuse: "NVML: PermissionError: [Errno 13] no",
    }


def test_a_skewed_clock_is_found_by_what_the_first_node_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No namespace has a real-time clock of its own: the reader is given a clock that is wrong."""
    asked = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: asked - 90)
        late = read_node_facts(host="n2")
    right = read_node_facts(host="n1")
    answered = time.time()
    nodes = [replace(node, asked=asked, answered=answered, load=None) for node in (right, late)]
    (found,) = [one for one in judge_nodes(nodes) if one.level == "error"]
    assert found.host == "n2"
    assert found.subject == "clock"
    assert "behind the other nodes'" in found.what


def test_what_others_do_on_our_cpus_is_measured_and_our_own_work_is_not() -> None:
    script = "import os\nprint(flush=True)\nwhile True: pass"
    count = len(os.sched_getaffinity(0))
    hogs = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for hog in hogs:
            assert hog.stdout and hog.stdout.readline()
        load = max(read_node_facts().load or 0.0 for _ in range(3))
    finally:
        for hog in hogs:
            hog.kill()
            hog.communicate()
    assert load >= 0.5, "each CPU has a process that never waits"


def test_torch_of_another_interpreter_is_found_and_not_imported(tmp_path: Path) -> None:
    """The interpreter is a wrapper with a torch of its own, which would fail if it were imported."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "version.py").write_text(
        "__version__ = '2.8.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    facts = read_node_facts(python=str(python))
    assert (facts.torch, facts.torch_cuda) == ("2.8.0+cu128", "12.8")
    own = read_node_facts()
    assert (own.torch, own.torch_cuda) == (torch.__version__, torch.version.cuda or "")
    (package / "version.py").write_text("cuda = 7")
    assert read_node_facts(python=str(python)).torch == ""
    facts = read_node_facts(python=str(tmp_path / "none"))
    assert facts.torch == ""
    assert any(one.check == "torch" and "FileNotFoundError" in one.reason for one in facts.unchecked)


KMSG = """\
6,1,1000;Linux version 6.8.0
;
NVRM: Xid (PCI:0000:b7:00): 79,
4,2,x;NVRM: Xid (PCI:0000:b7:00): 79,
4,2,5;NVRM: Xid (PCI:b7): 79,
4,2,5;NVRM: Xid (PCI:0000:b7:00): 79999999,
4,2,5000000,-;NVRM: Xid (PCI:0000:b7:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen\x1b off the bus.
 SUBSYSTEM=pci
12,3,6000000,-;NVRM: Xid (PCI:0000:b7:00): 48, a user has written this
3,4,7000000,-;NVRM: Xid (0000:07:00): 31, Ch 00000008
"""


def test_another_machines_files_are_read_and_nothing_else(tmp_path: Path) -> None:
    files = {
        "dev/kmsg": KMSG,
        "proc/self/status": "Cpus_allowed_list:\t0-3\n",
        "sys/devices/system/cpu/online": "0-7",
        "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB",
        "proc/sys/kernel/hostname": "far",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA Module  570.124.06  Wed\nGCC version: 12.3.0",
        "sys/class/infiniband/mlx5_10/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_2/ports/1/state": "1: DOWN",
        "sys/class/infiniband/mlx5_2/ports/1/rate": "10 Gb/sec (1X SDR)",
        "sys/class/infiniband/mlx5_2/ports/1/counters/link_downed": "7",
    }
    for path, content in files.items():
        put(tmp_path, path, content)
    facts = read_node_facts(tmp_path, [("/", "data")])
    assert (facts.host, facts.cpus, facts.driver) == ("far", 4, "570.124.06")
    assert (facts.memory_kib, facts.free_memory_kib) == (1000, 900)
    assert (facts.time, facts.load, facts.torch, facts.paths) == (0.0, None, "", ())
    assert [(nic.name, nic.state, nic.rate_gbps, nic.link_downed) for nic in facts.nics] == [
        ("mlx5_2:1", "DOWN", 10.0, 7),
        ("mlx5_10:1", "ACTIVE", 0.0, None),
    ]
    assert [(xid.pci, xid.number) for xid in facts.xids or ()] == [("0000:b7:00.0", 79), ("0000:07:00.0", 31)]
    assert next(xid.text for xid in facts.xids or ()).endswith("fallen? off the bus.")
    empty = read_node_facts(tmp_path / "sys")
    assert (empty.cpus, empty.xids, empty.nics, empty.gpus) == (0, None, (), ())
