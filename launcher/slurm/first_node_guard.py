"""Other nodes watch a job's first node, and end the attempt in its place if it is lost.

A job with --no-kill outlives its nodes: if the one with the batch script dies, SLURM has the job run on,
without anybody who would order or end anything. So a small step of its own runs on other nodes for as long as
the attempt, its preflight included: `python -m launcher.slurm.first_node_guard RUN_DIR FIRST_NODE`. The first
node tells it every two seconds that it is there.

Two signs together make the first node a lost one: it is silent, and it does not answer from outside either.
A slow disk, a slurmctld that restarts, an srun that dies: each gives one of them alone.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import LaunchError, SchedulerError
from launcher.launch.signals import FORWARDED
from launcher.protocol import LAUNCH_ATTEMPT, name_host
from launcher.runs.manifest import CLOSED, read_manifest, take_dict
from launcher.runs.records import read_nodes
from launcher.runs.run_directory import RunDir, release_space
from launcher.slurm.attempt import Attempt, claim_end, finish_attempt
from launcher.slurm.attempt_end import StepReport, classify_kill, diagnose
from launcher.slurm.commands import ask_job, ask_node_states, is_down, run_slurm
from launcher.slurm.job_request import read_job_request
from launcher.slurm.lost_nodes import FROZEN, SILENCE, UNREACHABLE, ask_addresses, is_frozen, try_connection
from launcher.slurm.node_channel import ALIVE_PERIOD, OWN_GAP
from launcher.slurm.step import Step
from launcher.text import leave, set_up_logging

logger = logging.getLogger("launcher.slurm.first_node_guard")

MOST_GUARDS = 8
"""Nodes that watch, spread over the job's: those that are lost together are often neighbours."""
ALIVE, OVER, READY = b".", b"!", b"."
"""What the first node writes, and a guard."""
UNREACHABLE_FOR = 30.0
"""Seconds of silence after which a first node that takes no connections is lost, whatever SLURM says."""
FROZEN_FOR = 60.0
"""The same for one that takes connections, but starts no process."""
STEADY = 10.0
"""Seconds in which it takes no connection, however long it has been silent."""
TICK = 1.0
"""Seconds between two looks."""
START_PATIENCE, END_PATIENCE = 5.0, 2.0
"""Seconds for the guards to start, if somebody waits for them, and to end."""
RETRY = 10.0
"""Seconds until another look if SLURM does not answer, or another node ends the attempt."""


@contextlib.contextmanager
def start_guards(attempt: Attempt) -> Iterator["subprocess.Popen[bytes] | None"]:
    """Have other nodes watch this one, if SLURM would have the job run on without it; gives the srun of that.

    A thread tells the guards again and again that this node is there.
    """
    own = name_host(attempt.environ)
    others = [host for host in attempt.step_hosts if host != own]
    if not (attempt.is_guarded and others):
        yield None
        return
    chosen = tuple(others[:: -(-len(others) // MOST_GUARDS)])
    module = "launcher.slurm.first_node_guard"
    command = (sys.executable, "-P", "-m", module, str(attempt.run.path), own)
    environ, pipe = {**attempt.environ, LAUNCH_ATTEMPT: str(attempt.run.first_attempt)}, subprocess.PIPE
    try:  # as this process dies, srun is not asked to end the guards, too
        process = Step(chosen, command, {"gres": "none"}).start(
            environ, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        logger.debug(f"no guards ({error})")  # the step of the ranks tells
        yield None
        return
    stdin, stdout, stopped = process.stdin, process.stdout, threading.Event()

    def tell() -> None:
        with contextlib.suppress(OSError):
            while stdin and not stopped.wait(ALIVE_PERIOD):
                stdin.write(ALIVE)
                stdin.flush()
            if stdin:
                stdin.write(OVER)
                stdin.close()

    threading.Thread(target=tell, daemon=True).start()
    if stdout and attempt.restarts:  # the step is to have its number before another one is begun
        select.select([stdout], [], [], START_PATIENCE)
    try:
        yield process
    finally:
        stopped.set()
        try:
            process.wait(END_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()


@dataclass(slots=True)
class Guard:
    """A guard: what it knows of the first node."""

    first: str
    own: str
    heard: float = field(default_factory=time.monotonic)
    """When the first node was last heard of."""
    has_claimed: bool = False
    """It ends the attempt, and goes on with that even if the first node comes back."""

    def listen(self) -> None:
        """Take the first node's lines: a thread's body. Their end says nothing: srun may have died alone."""
        while data := os.read(0, 1024):
            self.heard = time.monotonic()
            if OVER in data and not self.has_claimed:
                os._exit(0)

    def await_loss(self) -> str:
        """Wait until two signs say that the first node is lost, and return the second one, for people."""
        looked = time.monotonic()
        while True:
            time.sleep(TICK)
            now = time.monotonic()
            if now - looked > OWN_GAP:  # this process has slept, as its machine may have
                self.heard = max(self.heard, now - ALIVE_PERIOD)
            if now - self.heard > SILENCE and (evidence := self.find_evidence()):
                return evidence
            looked = time.monotonic()

    def find_evidence(self) -> str:
        """Say what tells from outside that the first node is lost; empty if there is not enough."""
        began = time.monotonic()
        while True:
            try:
                state = ask_node_states([self.first], os.environ).get(self.first, "")
                address = ask_addresses([self.first], os.environ)[self.first]
            except (SchedulerError, KeyError):
                return ""  # this node may be the one that is cut off
            is_open, now = try_connection(address), time.monotonic()
            if state.startswith("down") and self.heard < began:
                return f"SLURM says that it is {state}"
            if is_open is not False or self.heard > began:
                break
            if now > max(self.heard + UNREACHABLE_FOR, began + STEADY):
                # A node may be cut off from the first one alone: slurmctld must not reach it either.
                return UNREACHABLE if is_down(state) else ""
            time.sleep(TICK)
        if now < self.heard + FROZEN_FOR:
            return ""
        for _ in range(2):
            if not is_frozen(self.first, self.own, os.environ):
                self.heard = time.monotonic()
        return FROZEN if self.heard < began else ""

    def end_attempt(self, run_path: Path, evidence: str) -> bool:
        """End the attempt as its first node would have done; False if that is to be tried again.

        Raises LaunchError or OSError.
        """
        run, environ = RunDir(run_path, int(os.environ[LAUNCH_ATTEMPT])), os.environ
        manifest = read_manifest(run_path)
        if not manifest:
            return False
        if manifest.get("attempt") != run.first_attempt:
            return True
        attempt = Attempt(read_job_request(run_path, environ), run, environ, manifest, requeues=True)
        status = ask_job(attempt.job_id, environ)
        if classify_kill(status, attempt.restarts):
            return True
        states = ask_node_states(attempt.step_hosts, environ)
        addresses = ask_addresses(attempt.step_hosts, environ)
        lost = {self.first: evidence}
        for host in [host for host in attempt.step_hosts if host != self.first]:
            if states.get(host, "").startswith("down"):
                lost[host] = f"SLURM says that it is {states[host]}"
            elif host in addresses and try_connection(addresses[host]) is False:
                lost[host] = UNREACHABLE
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the requeue ends this step, too
        trouble = release_space(run)
        self.has_claimed = claim_end(run, self.own, lost) == self.own
        if not self.has_claimed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return False
        with contextlib.suppress(OSError):
            path = run_path / "logs" / f"slurm-{environ['SLURM_JOB_ID']}.out"
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), 2)
        logger.info(
            f"node {self.first}, which ran the batch script, is lost: {evidence}, and nothing was heard of it"
            f" for {time.monotonic() - self.heard:.0f} s: {self.own} ends the attempt in its place"
        )
        if take_dict(manifest, "outcome").get("state") not in CLOSED:
            records = [one for one in read_nodes(run_path, run.first_attempt) if one.host in attempt.hosts]
            report = StepReport(1, tuple(records), attempt.hosts)
            if finish_attempt(attempt, diagnose(attempt, report, status, lost, trouble)).decision.requeue:
                return True
        run_slurm(["scancel", attempt.job_id], environ)  # nothing else would end it before its time limit
        return True


def main() -> int:
    """Watch the first node until the attempt is over."""
    set_up_logging()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, *FORWARDED):
        signal.signal(number, signal.SIG_IGN)  # those are for the ranks
    guard = Guard(sys.argv[2], name_host(os.environ))
    threading.Thread(target=guard.listen, daemon=True).start()
    os.write(1, READY)
    while True:
        evidence = guard.await_loss()
        try:
            if guard.end_attempt(Path(sys.argv[1]), evidence):
                return 0
        except (OSError, LaunchError) as error:
            logger.warning(f"{guard.first} is lost, but its job cannot be ended from {guard.own}: {error}")
        time.sleep(RETRY)


if __name__ == "__main__":
    leave(main())
