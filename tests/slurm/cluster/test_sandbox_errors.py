"""The sandbox where something goes wrong: what it says, and that it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.seam import clean_environ, find_processes, wait_for

from .conftest import COMMAND, Sandbox, ask_command, demand_programs, list_groups, read_group

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize("moment", ["log/mariadb.log", "log/slurmctld.log"])
def test_an_interrupted_up_leaves_nothing(moment: str, short: Path) -> None:
    demand_programs()
    command: list[str | Path] = [sys.executable, COMMAND, "--folder", short, "up"]
    process = subprocess.Popen(command, env=clean_environ(), stderr=subprocess.PIPE, text=True)
    wait_for((short / moment).exists, moment)
    group = read_group(short)
    process.terminate()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 143, said
    assert "Traceback" not in said
    assert not short.exists()
    assert not find_processes(str(short))
    assert not list_groups(short, group)
    assert f"# sandbox {short}\n" not in Path("/etc/hosts").read_text()


def test_an_up_that_fails_says_why_and_leaves_nothing(short: Path, tmp_path: Path) -> None:
    demand_programs("--no-accounting")
    fake = tmp_path / "slurmctld"
    fake.write_text("#!/bin/sh\necho no luck >&2\nexit 7\n")
    fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = ask_command("--folder", short, "up", "--no-accounting", env={"PATH": path})
    assert done.returncode == 1
    assert f"sandbox: error: slurmctld -f {short}/slurm.conf failed with 7: no luck\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert not short.exists()
    assert not find_processes(str(short))


def test_a_cluster_is_there_once_dies_and_goes(short: Path) -> None:
    demand_programs("--no-accounting")
    command = ("--folder", short)
    assert ask_command(*command, "up", "--nodes", "1", "--no-accounting").returncode == 0
    done = ask_command(*command, "up")
    assert (done.returncode, done.stderr) == (
        1, f"sandbox: error: there is a cluster in {short} already: slurm/sandbox --folder {short} down\n",
    )  # fmt: skip
    for pid in find_processes(str(short)):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not find_processes(str(short)), "the daemons' end")
    for verb in ("up", "status"):
        done = ask_command(*command, verb)
        assert (done.returncode, "has died" in done.stderr) == (1, True), done
    assert ask_command(*command, "down").returncode == 0
    for verb in ("down", "status", "env", "ps", "restart-controller"):
        done = ask_command(*command, verb)
        expected = f"sandbox: error: there is no cluster in {short}: slurm/sandbox --folder {short} up\n"
        assert (done.returncode, done.stderr, done.stdout) == (1, expected, "")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("kill", "n9"), "there is no 'n9' here: one of n0, n1, n2, n3, slurmctld"),
        (("kill", "slurmdbd"), "there is no 'slurmdbd' here"),
        (("start", "n1"), "n1 is running: slurm/sandbox kill n1"),
        (("start", "slurmctld"), "slurmctld is running"),
    ],
    ids=" ".join,
)
def test_what_is_not_there_cannot_be_killed(words: tuple[str, ...], part: str, sandbox: Sandbox) -> None:
    done = ask_command("--folder", sandbox.folder, *words)
    assert done.returncode == 1
    assert done.stderr.startswith("sandbox: error: ")
    assert part in done.stderr
    assert done.stderr.count("\n") == 1


def test_another_users_folder_is_not_taken_down(short: Path) -> None:
    """Someone else can make a folder under /tmp first; what it says is not to be believed."""
    if os.geteuid():
        pytest.skip("only root can make a folder that is another user's")
    short.mkdir()
    (short / "cluster.json").write_text(json.dumps({"folder": "/etc", "ports": []}))
    os.chown(short, 65534, 65534)
    for verb in ("up", "down", "status"):
        done = ask_command("--folder", short, verb)
        assert (done.returncode, "is not yours, but user 65534's" in done.stderr) == (1, True), done
    assert (short / "cluster.json").exists()
