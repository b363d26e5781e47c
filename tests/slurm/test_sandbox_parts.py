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


def make_cluster(folder: str, nodes: int = 2) -> "Cluster":
    from sandboxed.cluster import Cluster

    return Cluster(
        folder=folder, nodes=nodes, gpus=1, cpus=8, memory_mib=1000, accounting=False, kill_wait=9,
        ports=(17000, 17001, *range(17002, 17002 + nodes)),
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
        (("--nodes", "0"), "--nodes and --memory from 1"),
        (("--cpus", "6"), "--cpus 4 or a multiple of it"),
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


def test_old_and_new_slurm_are_kept_from_cgroups(hosts: ModuleType) -> None:
    from sandboxed.packages import find_version
    from sandboxed.render import render_cgroup_conf

    assert hosts
    assert render_cgroup_conf(find_version("slurm-wlm 22.05.8\n")) == "CgroupPlugin=cgroup/v1\n"
    assert render_cgroup_conf(find_version("slurm 24.05.2\n")) == "CgroupPlugin=disabled\n"


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
