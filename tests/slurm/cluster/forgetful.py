"""Clusters that forget a job soon after its end, and answer soon when they cannot."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.seam import is_alive, wait_for
from tests.slurm.cluster.conftest import Sandbox, demand_programs, start_sandbox

BRIEF = "MinJobAge=2\nMessageTimeout=2\n"
"""In seconds; the defaults are 300 and 10."""


@contextmanager
def start_forgetful(*options: str) -> Iterator[Sandbox]:
    """A cluster of its own."""
    demand_programs(*options)
    with start_sandbox(*options) as cluster:
        text = cluster.conf.read_text().replace("MinJobAge=3600\n", BRIEF)
        assert BRIEF in text
        cluster.conf.write_text(text)
        cluster.run("scontrol", "reconfigure")
        yield cluster


def forget(cluster: Sandbox, job_id: str) -> None:
    """Wait until the controller no longer knows a job."""
    words = ("squeue", "--noheader", "--states=all", "--format=%A")
    wait_for(lambda: job_id not in cluster.run(*words).split(), f"job {job_id} to be forgotten", 90)


@contextmanager
def stop_controller(cluster: Sandbox) -> Iterator[None]:
    """No slurmctld for a while."""
    pid = int((cluster.folder / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not is_alive(pid), "slurmctld's end", 30)
    try:
        yield
    finally:
        cluster.run("slurmctld", "-f", cluster.conf)
        wait_for(lambda: does_answer(cluster), "slurmctld", 30)


def does_answer(cluster: Sandbox) -> bool:
    """Whether slurmctld answers."""
    ping = ["scontrol", "ping"]
    return subprocess.run(ping, env=cluster.environ, capture_output=True, check=False).returncode == 0
