"""What of the sandbox works without a SLURM: its options' errors, missing programs, /etc/hosts, its files."""

import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from .conftest import COMMAND, ask_command

if TYPE_CHECKING:
    from sandboxed.cluster import Cluster


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, with a file of the test's own for /etc/hosts."""
    monkeypatch.syspath_prepend(str(COMMAND.parent))
    from sandboxed import hosts

    monkeypatch.setattr(hosts, "HOSTS", tmp_path / "hosts")
    return hosts


def make_cluster(folder: str, nodes: int = 2, cpus: int = 8, cgroup: str = "") -> "Cluster":
    from sandboxed.cluster import Cluster

    return Cluster(
        folder=folder, nodes=nodes, gpus=1, cpus=cpus, memory_mib=1000, accounting=False, kill_wait=9,
        ports=(17000, 17001, *range(17002, 17002 + nodes)), cgroup=cgroup,
    )  # fmt: skip


@pytest.mark.parametrize("before", ["", "127.0.0.1 localhost\n", "127.0.0.1 localhost"])
def test_each_cluster_has_its_own_line(before: str, hosts: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(before)
    first, second = make_cluster("/tmp/s"), make_cluster("/tmp/s2")
    hosts.add_names(first)
    hosts.add_names(second)
    assert "127.0.0.1 n0 n1 # sandbox /tmp/s\n127.0.0.1 n0 n1 # sandbox /tmp/s2\n" in file.read_text()
    hosts.drop_names(first)
    assert "/tmp/s\n" not in file.read_text()
    assert "127.0.0.1 n0 n1 # sandbox /tmp/s2\n" in file.read_text()
    hosts.drop_names(second)
    assert file.read_text().rstrip("\n") == before.rstrip("\n")


def test_hosts_that_cannot_be_written_are_told_of_once_the_names_are_missing(
    hosts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    monkeypatch.setattr(hosts.os, "access", lambda *_: False)
    known = {"n0", "n1"}
    monkeypatch.setattr(hosts, "resolves", lambda name: name in known or not name.startswith("n"))
    hosts.add_names(make_cluster("/tmp/s"))
    assert capsys.readouterr().err == ""
    known.clear()
    hosts.add_names(make_cluster("/tmp/s"))
    assert "'127.0.0.1 n0 n1 # sandbox /tmp/s' | sudo tee -a" in capsys.readouterr().err
    assert (tmp_path / "hosts").read_text() == "127.0.0.1 localhost\n"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--nodes", "0"), "--nodes, --cpus and --memory from 1"),
        (("--cpus", "0"), "--nodes, --cpus and --memory from 1"),
        (("--kill-wait", "0"), "--kill-wait from 1"),
    ],
    ids=" ".join,
)
def test_sizes_that_cannot_be(words: tuple[str, ...], part: str, tmp_path: Path) -> None:
    done = ask_command("--folder", "/tmp/no-such-sandbox", "up", *words)
    assert done.returncode == 1
    assert done.stderr.startswith("sandbox: error: ")
    assert part in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["with blank", "x" * 90, "a,b"])
def test_folders_that_slurm_does_not_take(name: str, tmp_path: Path) -> None:
    done = ask_command("--folder", tmp_path / name, "up")
    assert (done.returncode, "at most 80 characters, without blanks" in done.stderr) == (1, True), done
    assert not (tmp_path / name).exists()


def test_missing_programs_are_named_with_the_way_to_get_them(tmp_path: Path) -> None:
    done = ask_command("install", "--dry-run", env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert (
        "slurm-client" in done.stderr
    )  # its programs are nowhere but in PATH; the daemons are in /usr/sbin too
    assert "slurm/sandbox install, as root on Debian" in done.stderr
    done = ask_command("--folder", "/tmp/no-such-sandbox", "up", env={"PATH": str(tmp_path)})
    assert (done.returncode, "missing, and no apt-get" in done.stderr) == (1, True), done
    assert not Path("/tmp/no-such-sandbox").exists()


def test_the_help_names_every_verb() -> None:
    shown = ask_command("--help").stdout
    for verb in ("up", "down", "status", "env", "ps", "kill", "start", "restart-controller", "install"):
        assert f"\n    {verb} " in shown or f"\n    {verb}\n" in shown


def test_it_runs_by_itself() -> None:
    assert os.access(COMMAND, os.X_OK)
    assert subprocess.run([COMMAND, "up", "--help"], capture_output=True, check=False).returncode == 0


def test_old_and_new_slurm_are_kept_from_cgroups_where_there_are_none(hosts: ModuleType) -> None:
    from sandboxed.packages import find_version
    from sandboxed.render import render_cgroup_conf, render_slurm_conf

    assert hosts
    for version, plugin in (("slurm-wlm 22.05.8\n", "cgroup/v1"), ("slurm 24.05.2\n", "disabled")):
        text = render_cgroup_conf(make_cluster("/tmp/s"), find_version(version), swap=False)
        assert text == f"CgroupPlugin={plugin}\n"
    text = render_slurm_conf(make_cluster("/tmp/s"), "me")
    assert "ProctrackType=proctrack/pgid\nTaskPlugin=task/none\n" in text
    assert "jobacct_gather" not in text


@pytest.mark.parametrize(("swap", "word"), [(True, "yes"), (False, "no")])
def test_with_cgroups_slurm_constrains_jobs_below_the_clusters_own(
    swap: bool, word: str, hosts: ModuleType
) -> None:
    from sandboxed.render import render_cgroup_conf, render_slurm_conf

    assert hosts
    cluster = make_cluster("/tmp/s", cgroup="launch-sandbox-1")
    assert render_cgroup_conf(cluster, (24, 11), swap).splitlines() == [
        "CgroupPlugin=cgroup/v1",
        "CgroupMountpoint=/tmp/s/cgroup",
        "ConstrainCores=yes",
        "ConstrainRAMSpace=yes",
        f"ConstrainSwapSpace={word}",
        "ConstrainDevices=yes",
    ]
    lines = render_slurm_conf(cluster, "me").splitlines()
    assert {
        "ProctrackType=proctrack/cgroup",
        "TaskPlugin=task/cgroup,task/affinity",
        "JobAcctGatherType=jobacct_gather/cgroup",
    } <= {*lines}
    assert "TaskPlugin=task/none" not in lines


@pytest.mark.parametrize(
    ("cpus", "shape"),
    [
        (16, "Sockets=2 CoresPerSocket=4 ThreadsPerCore=2"),
        (2, "Sockets=1 CoresPerSocket=2 ThreadsPerCore=1"),
        (1, "Sockets=1 CoresPerSocket=1 ThreadsPerCore=1"),
    ],
)
def test_the_shape_of_a_node(cpus: int, shape: str, hosts: ModuleType) -> None:
    from sandboxed.render import render_slurm_conf

    assert hosts
    text = render_slurm_conf(make_cluster("/tmp/s", cpus=cpus), "me")
    assert text.count(f" {shape} RealMemory=1000 ") == 2
    assert f"DefMemPerCPU={1000 // cpus}\n" in text


def test_the_configuration_as_a_whole(hosts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from sandboxed import render

    monkeypatch.setattr("socket.gethostname", lambda: "laptop")
    text = render.render_slurm_conf(make_cluster("/tmp/s", nodes=1), "me")
    assert hosts
    assert text.splitlines()[-3:] == [
        "NodeName=n0 NodeHostname=laptop NodeAddr=127.0.0.1 Port=17002 Sockets=2 CoresPerSocket=2"
        " ThreadsPerCore=2 RealMemory=1000 Feature=sandbox Gres=gpu:1",
        "PartitionName=main Nodes=n0 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=0",
        "PartitionName=urgent Nodes=n0 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF",
    ]
    assert "KillWait=9\n" in text
    assert "SlurmUser=me\n" in text
