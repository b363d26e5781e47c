"""What of the sandbox works without a SLURM: its options' errors, missing programs, /etc/hosts, its files."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import COMMAND, ask_command


@pytest.fixture
def sandboxed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Its modules, with a file of the test's own for /etc/hosts."""
    monkeypatch.syspath_prepend(str(COMMAND.parent))
    from sandboxed import cluster, conf, daemons

    monkeypatch.setattr(daemons, "HOSTS", tmp_path / "hosts")
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    sizes = {"gpus": 1, "memory": 1000, "kill_wait": 9, "accounting": False}

    def make(folder: str = "/tmp/s", nodes: int = 2, **more: Any) -> Any:
        ports = (17000, 17001, *range(17002, 17002 + nodes))
        return cluster.Cluster(folder, ports, nodes=nodes, **{**sizes, **more})

    def render(version: str = "slurm 24.11.1", swap: bool = False, **more: Any) -> dict[str, str]:
        files: dict[str, str] = conf.render_files(make(**more), "me", version, swap)
        return files

    return SimpleNamespace(make=make, render=render, daemons=daemons)


@pytest.mark.parametrize("before", ["", "127.0.0.1 localhost\n", "127.0.0.1 localhost"])
def test_each_cluster_has_its_own_line(before: str, sandboxed: Any, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(before)
    first, second = sandboxed.make("/tmp/s"), sandboxed.make("/tmp/s2")
    sandboxed.daemons.add_names(first)
    sandboxed.daemons.add_names(second)
    assert "127.0.0.1 n0 n1 # sandbox /tmp/s\n127.0.0.1 n0 n1 # sandbox /tmp/s2\n" in file.read_text()
    sandboxed.daemons.drop_names(first)
    assert "/tmp/s\n" not in file.read_text()
    assert "127.0.0.1 n0 n1 # sandbox /tmp/s2\n" in file.read_text()
    sandboxed.daemons.drop_names(second)
    assert file.read_text().rstrip("\n") == before.rstrip("\n")


def test_hosts_that_cannot_be_written_are_told_of_once_the_names_are_missing(
    sandboxed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
    monkeypatch.setattr(sandboxed.daemons.os, "access", lambda *_: False)
    # Another sandbox of this machine may have given it the same names.
    monkeypatch.setattr(sandboxed.daemons, "_resolves", lambda name: name not in ("n0", "n1"))
    for nodes, told in ((0, False), (2, True)):
        sandboxed.daemons.add_names(sandboxed.make(nodes=nodes))
        line = "'127.0.0.1 n0 n1 # sandbox /tmp/s' | sudo tee -a"
        assert (line in capsys.readouterr().err) == told
    assert (tmp_path / "hosts").read_text() == "127.0.0.1 localhost\n"


@pytest.mark.parametrize(
    ("folder", "words", "part"),
    [
        ("sandbox", "--nodes 0", "--nodes from 1 on"),
        ("sandbox", "--cpus 0", "--cpus from 1 on"),
        ("sandbox", "--kill-wait 0", "--kill-wait from 1 on"),
        ("sandbox", "--nodes 1 --switches 2", "--switches up to the number of nodes"),
        ("with blank", "", "at most 80 characters, without blanks"),
        ("x" * 90, "", "at most 80 characters, without blanks"),
        ("a,b", "", "at most 80 characters, without blanks"),
    ],
)
def test_options_that_cannot_be(folder: str, words: str, part: str, tmp_path: Path) -> None:
    # The path is short, as the folder's must be.
    done = ask_command("--folder", Path("/tmp/none", folder), "up", *words.split())
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done
    assert done.stderr.startswith("sandbox: error: ") and part in done.stderr
    assert not Path("/tmp/none").exists()


def test_missing_programs_are_named_with_the_way_to_get_them(tmp_path: Path) -> None:
    done = ask_command("install", "--dry-run", env={"PATH": str(tmp_path)})
    # Its programs are nowhere but in PATH; the daemons are in /usr/sbin too.
    assert (done.returncode, "slurm-client" in done.stderr) == (1, True)
    assert "slurm/sandbox install, as root on Debian" in done.stderr
    done = ask_command("--folder", "/tmp/none", "up", env={"PATH": str(tmp_path)})
    assert (done.returncode, "missing, and no apt-get" in done.stderr) == (1, True), done
    assert not Path("/tmp/none").exists()


def test_the_help_names_every_verb_and_it_runs_by_itself() -> None:
    shown = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, check=True).stdout
    for verb in ("up", "down", "status", "env", "ps", "kill", "start", "restart-controller", "install"):
        assert f"\n    {verb} " in shown or f"\n    {verb}\n" in shown


def test_the_configuration(sandboxed: Any) -> None:
    files = sandboxed.render(nodes=1, cpus=8)
    assert files["slurm.conf"].splitlines()[-3:] == [
        "NodeName=n0 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17002 Sockets=2 CoresPerSocket=2"
        " ThreadsPerCore=2 RealMemory=1000 Feature=sandbox Gres=gpu:1",
        "PartitionName=main Nodes=n0 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=0",
        "PartitionName=urgent Nodes=n0 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF",
    ]
    assert "KillWait=9\n" in files["slurm.conf"] and "SlurmUser=me\n" in files["slurm.conf"]
    assert files["gres.conf"] == "NodeName=n0 Name=gpu File=/tmp/s/gpus/nvidia[0-0]\n"
    leaves = sandboxed.render(nodes=3, switches=2)["topology.conf"]
    assert leaves == "SwitchName=s0 Nodes=n0,n2\nSwitchName=s1 Nodes=n1\nSwitchName=top Switches=s0,s1\n"


def test_the_shape_of_a_node(sandboxed: Any) -> None:
    for cpus, shape in (
        (16, "Sockets=2 CoresPerSocket=4 ThreadsPerCore=2"),
        (2, "Sockets=1 CoresPerSocket=2 ThreadsPerCore=1"),
        (1, "Sockets=1 CoresPerSocket=1 ThreadsPerCore=1"),
    ):
        text = sandboxed.render(cpus=cpus)["slurm.conf"]
        assert text.count(f" {shape} RealMemory=1000 ") == 2
        assert f"DefMemPerCPU={1000 // cpus}\n" in text


def test_jobs_are_tracked_with_cgroups_and_without(sandboxed: Any) -> None:
    for version, plugin in (("slurm-wlm 22.05.8\n", "cgroup/v1"), ("slurm 24.05.2\n", "disabled")):
        files = sandboxed.render(version)
        assert files["cgroup.conf"] == f"CgroupPlugin={plugin}\n"
        assert "ProctrackType=proctrack/pgid\nTaskPlugin=task/none\n" in files["slurm.conf"]
        assert "jobacct_gather" not in files["slurm.conf"]
    for swap, word in ((True, "yes"), (False, "no")):
        files = sandboxed.render(swap=swap, cgroup="launch-sandbox-1")
        assert files["cgroup.conf"].splitlines() == [
            "CgroupPlugin=cgroup/v1",
            "CgroupMountpoint=/tmp/s/cgroup",
            "ConstrainCores=yes",
            "ConstrainRAMSpace=yes",
            f"ConstrainSwapSpace={word}",
            "ConstrainDevices=yes",
        ]
        plugins = "proctrack/cgroup\nTaskPlugin=task/cgroup,task/affinity\n"
        assert f"ProctrackType={plugins}JobAcctGatherType=jobacct_gather/cgroup\n" in files["slurm.conf"]
