"""The step of a job: srun with one task of ours on each node."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.batch.place import ATTEMPT, RENDEZVOUS
from launcher.batch.sight import Attempt
from launcher.launch.control import KILL_WAIT, LOST, open_channel, write_signal, write_word
from launcher.launch.processes import prepare_agent
from launcher.launch.signals import FORWARDED
from launcher.launch.slurm.ownjob import ask_kill_wait
from launcher.launch.slurm.step import Container, Step, give_cpus, render_step
from launcher.launch.slurm.stepenv import clean_for_step
from launcher.launch.slurm.told import is_accounted, is_noise, is_own, parse_lost
from launcher.runs.nodes import NodeRecord, read_nodes
from launcher.schema import ContainerConfig

LAST = 40
"""Lines of srun's that are kept for the account."""
SETTLE = 5.0
"""Seconds for a record to come into sight of this node, on a filesystem that tells late of new files."""


@dataclass(slots=True)
class NodeStep:
    """A running step whose tasks are ours."""

    process: "subprocess.Popen[bytes]"
    control: int
    """Descriptor of srun's stdin, which every task reads a copy of."""
    environ: Mapping[str, str]
    started: float = field(default_factory=time.time)
    said: deque[str] = field(default_factory=lambda: deque(maxlen=LAST))
    """srun's own lines."""
    reader: threading.Thread = field(init=False)
    teller: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Begin to pass stderr on, and tell the tasks how long SLURM will wait for them."""
        self.reader = threading.Thread(target=self.pass_errors, daemon=True)
        self.teller = threading.Thread(target=self.tell_patience, daemon=True)
        self.reader.start()
        self.teller.start()

    def tell_patience(self) -> None:
        """Ask SLURM for its KillWait, once the step is on its way: the thread's body."""
        seconds = ask_kill_wait(self.environ)
        if seconds is not None:
            write_word(self.control, f"{KILL_WAIT} {seconds}")

    def send(self, number: int) -> None:
        """Send a signal to the ranks, by way of their supervisors."""
        write_signal(self.control, number)

    def pass_errors(self) -> None:
        """Copy the tasks' stderr to ours, and keep srun's own lines: the thread's body."""
        for raw in self.process.stderr or ():
            line = raw.decode(errors="replace").rstrip("\n")
            if is_own(line):
                if is_noise(line):
                    continue
                known = is_accounted(line, self.said)
                self.said.append(line)
                if known:
                    continue
                if parse_lost(line):
                    write_word(self.control, LOST)  # to those that can go on: of an elastic job
            with contextlib.suppress(OSError):
                os.write(2, raw)

    def close(self) -> None:
        """Take what is left, after srun's end."""
        self.reader.join(SETTLE)
        self.teller.join()
        os.close(self.control)


def describe_step(attempt: Attempt) -> Step:
    """Return the step over the nodes of an attempt."""
    request = attempt.request
    config = request.config
    box = config.cluster.container
    return Step(
        nodes=len(attempt.hosts),
        nodelist=attempt.hosts,
        elastic=request.min_nodes < request.max_nodes,
        directory=request.directory,
        command=(
            box.python if box.image else sys.executable,
            *("-P", "-m", "launcher.batch.task", str(attempt.run.path)),
        ),
        options=config.cluster.srun,
        container=describe_container(box, attempt.run.path, request.directory),
    )


def describe_container(config: ContainerConfig, run_path: Path, directory: str) -> Container | None:
    """Return the container with the run directory and the working directory mounted, if there is one."""
    if not config.image:
        return None
    mounts = (f"{run_path}:{run_path}", f"{directory}:{directory}", *config.mounts)
    return Container(config.runtime, config.image, mounts, tuple(config.args))


def start_nodes(attempt: Attempt, endpoint: str) -> NodeStep:
    """Start a task on each node, which are to meet at `endpoint`; raises OSError where there is no srun."""
    told = {ATTEMPT: str(attempt.run.first_attempt), RENDEZVOUS: endpoint}
    step = describe_step(attempt)
    step = replace(step, options=give_cpus(step.options, attempt.environ))
    reading, writing = open_channel()
    parent = os.getpid()
    try:
        process = subprocess.Popen(
            render_step(step),
            env={**clean_for_step(attempt.environ), **told},
            stdin=reading,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the head alone
            preexec_fn=lambda: prepare_agent(parent, FORWARDED),  # noqa: PLW1509 - no other thread forks here
        )
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return NodeStep(process, writing, attempt.environ)


def collect_nodes(attempt: Attempt, step: NodeStep) -> list[NodeRecord]:
    """Return the nodes' records, those that come late too where srun knows of no failure."""
    run, deadline = attempt.run, time.monotonic() + SETTLE
    while True:
        records = read_nodes(run.path, run.first_attempt)
        if len(records) >= len(attempt.hosts) or step.process.returncode or time.monotonic() > deadline:
            return records
        time.sleep(0.1)
