"""Lost nodes of a job: a spare one takes their place, and if it was the first one, another ends the attempt.

Two signs together make a node a lost one: it is silent, and it does not answer from outside either. A task
that is silent alone may be slow, or its node short of memory; a slurmctld that restarts or an srun that dies
gives one sign alone, too. `Liveness` has no clock and no network: times are seconds of one monotonic clock,
which the caller reads.

SLURM has a job with --no-kill run on without its first node, and nobody would order or end anything there. So
a small step of its own runs on other nodes for as long as the attempt, its preflight included: `python -m
launcher.slurm.lost_nodes RUN_DIR FIRST_NODE`. The first node tells it every two seconds that it is there.
"""

import contextlib
import errno
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import LaunchError, SchedulerError
from launcher.launch.signals import FORWARDED
from launcher.protocol import LAUNCH_ATTEMPT, name_host
from launcher.runs.manifest import CLOSED, read_manifest, stamp_time
from launcher.runs.records import read_nodes
from launcher.runs.run_directory import RunDir, release_space
from launcher.slurm.attempt import (
    Attempt,
    carry_out,
    claim_end,
    classify_kill,
    diagnose,
    list_claims,
    report_end,
)
from launcher.slurm.commands import NodeState, ask_down_nodes, ask_job, ask_nodes, run_slurm
from launcher.slurm.job_request import read_job_request
from launcher.slurm.step import ALIVE_PERIOD, ASK_ALIVE, OWN_GAP, NodeReport, NodeStep, Step, StepReport
from launcher.text import leave, set_up_logging

logger = logging.getLogger("launcher.slurm.lost_nodes")

SILENCE = 8.0
"""Seconds without a word after which a node is looked at: four words are missing."""
DOUBT = 1.5
"""The same once a rank has failed: a lost node may be why, and all tasks are asked to answer at once."""
BEGINNING = 60.0
"""The same for a task that has not said a word: srun takes its time with many nodes."""
MAX_UNREACHABLE = 2
"""Connections in a row that fail before a silent node is lost, a second apart at least."""
UNREACHABLE = "its SLURM daemon cannot be reached"
"""What a node's loss is told by."""
CONNECT_TIMEOUT = 2.0
"""Seconds for a connection within a cluster; the kernel's first repetition comes after one."""
UNREACHABLE_ERRORS = frozenset(
    (errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)
)
"""Errors that tell of the other node, rather than of this one or of its name's lookup."""
TICK = 1.0
"""Seconds between two looks, and so between two connections to a node."""
LONGEST_HOLD = 25.0
"""Seconds after which a failure counts, whatever is known of the nodes."""
MAX_CONNECTIONS = 16
"""Connections that are tried at the same time."""
END_GRACE = 3.0
"""Seconds that srun has once every task that it still has is over."""
MOST_GUARDS = 8
"""Nodes that watch the first one, spread over the job's: neighbours are often lost together."""
ALIVE, OVER, READY = b".", b"!", b"."
"""What the first node writes, and a guard."""
UNREACHABLE_FOR, STEADY = 20.0, 10.0
"""Seconds of silence, and then of tries in a row, after which a first node that takes no connection is lost,
if SLURM misses it too."""
START_PATIENCE, END_PATIENCE = 5.0, 2.0
"""Seconds for the guards to start, and to end."""
RETRY = 10.0
"""Seconds between two starts of the guards' step, two tries to end the attempt, and two looks at a first node
that has been silent for long."""


def try_connection(node: NodeState) -> bool | None:
    """Tell whether a node takes a connection to its slurmd; None if that says nothing about the node."""
    if not node.port:
        return None
    try:
        with socket.create_connection((node.address, node.port), CONNECT_TIMEOUT):
            return True
    except TimeoutError:
        return False
    except OSError as error:
        return False if error.errno in UNREACHABLE_ERRORS else None


@dataclass(slots=True)
class Liveness:
    """What is known of the nodes of a job."""

    hosts: tuple[str, ...]
    now: float
    """The last look, and at first the beginning."""
    doubted: float = 0.0
    """When a rank failed, so that each node is to be heard from again."""
    lost: set[str] = field(default_factory=set)
    heard: dict[str, float] = field(init=False)
    """When each task was last heard of; the beginning for one that never was."""
    spoken: set[str] = field(default_factory=set)
    """Nodes whose task was ever heard of."""
    unreachable: Counter[str] = field(default_factory=Counter)
    """Connections in a row that have failed since then."""

    def __post_init__(self) -> None:
        """Count from the beginning."""
        self.heard = dict.fromkeys(self.hosts, self.now)

    def note_heard(self, host: str, now: float) -> None:
        """Take a word of a node's task."""
        if host in self.heard:
            self.heard[host], self.unreachable[host] = now, 0
            self.spoken.add(host)

    def note_look(self, now: float) -> None:
        """Take that the caller looks again; if it has slept, as its machine may have, all begins again."""
        if now - self.now > OWN_GAP:
            self.heard = {host: max(heard, now - ALIVE_PERIOD) for host, heard in self.heard.items()}
            self.unreachable.clear()
            self.doubted = now if self.doubted else 0.0
        self.now = now

    def list_suspects(self) -> list[str]:
        """Return the nodes that have been silent for longer than a sound one is, and are to be tried."""
        latest, beginning = self.now - SILENCE, self.now - BEGINNING
        if self.doubted < self.now - DOUBT:  # a node that was heard of after the failure is there
            latest = max(latest, self.doubted)
        return [
            host
            for host, heard in self.heard.items()
            if heard < (latest if host in self.spoken else beginning) and host not in self.lost
        ]

    def note_connection(self, host: str, *, is_open: bool) -> None:
        """Take how an attempt to connect to a suspect's daemon went."""
        self.unreachable[host] = 0 if is_open else self.unreachable[host] + 1

    def take_losses(self) -> dict[str, float]:
        """Return the suspects that are lost by now, each once, and the seconds since their last word."""
        suspects = [host for host in self.list_suspects() if self.unreachable[host] >= MAX_UNREACHABLE]
        self.lost |= {*suspects}
        return {host: self.now - self.heard[host] for host in suspects}

    def has_heard_all(self, since: float) -> bool:
        """Tell whether each node was heard of after a time, or is lost."""
        return all(host in self.lost or heard > since for host, heard in self.heard.items())


@dataclass(slots=True)
class NodeReplacement:
    """Hears a step's tasks, tries nodes that fall silent, and has spare ones take the place of those lost.

    A failure is held back until each node was heard of after it: a lost node may be why. `attend` is called
    again and again by the process that writes the manifest; a thread of its own tries the nodes.
    """

    attempt: Attempt
    step: NodeStep
    liveness: Liveness = field(init=False)
    held: list[tuple[float, NodeReport]] = field(default_factory=list)
    """Failures, and when they came."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Of these two."""
    nodes: dict[str, NodeState] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    """Nodes that fell silent, and for how many seconds."""
    ended_at: float = math.inf
    """Monotonic time at which all tasks that are left were over."""
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Begin to watch."""
        self.liveness = Liveness(self.attempt.step_hosts, time.monotonic())
        self.step.holds_back = self.hear
        names = self.attempt.spares
        logger.info(f"spare node{'s' * (len(names) > 1)} {', '.join(names)}: idle until a node is lost")
        threading.Thread(target=self.watch, daemon=True).start()

    def hear(self, report: NodeReport) -> bool:
        """Note that a node was heard of; true for a failure, after which all tasks are asked to answer."""
        now, is_failure = time.monotonic(), report.kind == "failed"
        with self.lock:
            self.liveness.note_heard(report.host, now)
            if is_failure:
                self.held.append((now, report))
                self.liveness.doubted = now
                self.step.unsent.put(ASK_ALIVE)
        self.pass_failures_on()
        return is_failure

    def pass_failures_on(self) -> None:
        """Pass on the failures after which each node was heard of, or that have waited for long."""
        with self.lock:
            now, waiting = time.monotonic(), list[tuple[float, NodeReport]]()
            over, self.held = self.held, waiting
            for when, report in over:
                if now - when <= LONGEST_HOLD and not self.liveness.has_heard_all(when):
                    waiting.append((when, report))
        for item in over:
            if item not in waiting:
                self.step.take_report(item[1])

    def watch(self) -> None:
        """Try the nodes that are silent, and give up those that are lost: a thread's body."""
        own = self.attempt.environ.get("SLURMD_NODENAME", "")  # never lost: this process would not run
        while not self.stopped.wait(TICK):
            with self.lock:
                self.liveness.note_look(time.monotonic())
                suspects = [host for host in self.liveness.list_suspects() if host != own]
            found = self.try_nodes(suspects, own) if suspects else {}
            with self.lock:
                for host, is_open in found.items():
                    self.liveness.note_connection(host, is_open=is_open)
                losses = self.liveness.take_losses()
            self.losses |= losses
            for host, silence in losses.items():
                nothing = f"nothing was heard of it for {silence:.0f} s"
                logger.info(f"node {host} is lost: {UNREACHABLE}, and {nothing}")
                self.step.take_report(NodeReport("lost", host))
            self.pass_failures_on()

    def try_nodes(self, suspects: list[str], own: str) -> dict[str, bool]:
        """Connect to suspects, and return which take it; none of them if this node is cut off."""
        witness = next((host for host in self.liveness.hosts if host not in suspects), own)
        missing = [host for host in (witness, *suspects) if host not in self.nodes]
        with contextlib.suppress(SchedulerError):
            self.nodes |= ask_nodes(missing, self.attempt.environ)
        known = [host for host in (witness, *suspects) if host in self.nodes]
        with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
            answers = pool.map(lambda host: try_connection(self.nodes[host]), known)
            found = dict(zip(known, answers, strict=True))
        if not found.pop(witness, False):
            return {}
        return {host: is_open for host, is_open in found.items() if is_open is not None}

    def attend(self) -> None:
        """Keep the manifest's account, and end an srun that waits for lost nodes."""
        attempt, coordinator = self.attempt, self.step.coordinator
        if coordinator is None:
            return
        before, start = attempt.hosts, coordinator.start
        hosts = tuple(node.host for node in start.nodes) if start else before
        spares = [host for host in attempt.spares if host not in coordinator.lost and host not in hosts]
        for old, new in zip(before, hosts, strict=True):
            if old != new:
                logger.info(f"spare node {new} takes the place of {old}")
                silence = self.losses.get(old)
                account = {
                    "lost": old,
                    "spare": new,
                    "time": stamp_time(),
                    "evidence": "SLURM gave it up" if silence is None else UNREACHABLE,
                    "silence": None if silence is None else round(silence, 1),
                }
                attempt.manifest.last.replacements.append(account)
        attempt.manifest.last.hosts = list(hosts)
        if spares != [*attempt.spares]:
            attempt.manifest.last.spares = spares
            attempt.write()
        if not (self.losses or self.step.lost) or not coordinator.is_over:
            return
        # Every node that takes part, and is not lost, has left its record.
        records = {record.host for record in read_nodes(attempt.run.path, attempt.run.first_attempt)}
        if {*attempt.hosts} <= records | coordinator.lost:
            self.ended_at = min(self.ended_at, time.monotonic())
            if time.monotonic() > self.ended_at + END_GRACE:
                self.step.process.kill()

    def close(self) -> None:
        """End the watch, and complete the account."""
        self.stopped.set()
        self.attend()


# The first node


@contextlib.contextmanager
def start_guards(attempt: Attempt) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Have other nodes watch this one; gives the srun of that, another one if SLURM ends the step.

    A thread tells the guards again and again that this node is there. As this process dies, srun is not asked
    to end them, too.
    """
    own, stopped = name_host(attempt.environ), threading.Event()
    command = (sys.executable, "-P", "-m", "launcher.slurm.lost_nodes", str(attempt.run.path), own)
    environ, pipe = {**attempt.environ, LAUNCH_ATTEMPT: str(attempt.run.first_attempt)}, subprocess.PIPE
    newest = list["subprocess.Popen[bytes]"]()

    def start(down: Collection[str] = ()) -> None:
        others = [host for host in attempt.step_hosts if host != own and host not in down]
        step = Step(tuple(others[:: -(-len(others) // MOST_GUARDS) or 1]), command, {"gres": "none"})
        if not others:
            return
        with contextlib.suppress(OSError):  # the step of the ranks tells
            process = step.start(environ, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            for stream in (stream for old in newest for stream in (old.stdin, old.stdout) if stream):
                stream.close()
            newest[:] = [process]

    def write(word: bytes) -> None:
        with contextlib.suppress(OSError):
            for process in newest:
                os.write(process.stdin.fileno(), word)  # type: ignore[union-attr]  # a pipe

    def tell() -> None:
        due = -math.inf
        while newest and not stopped.wait(ALIVE_PERIOD):
            code, now = newest[0].poll(), time.monotonic()
            if code is not None and now >= due:  # as SLURM 22.05 does if a node has just come back
                if now > due + RETRY:
                    logger.info(f"the guards' step ended (srun {code}): it is started again")
                due, down = now + RETRY, ask_down_nodes(attempt.step_hosts, environ)
                if not stopped.is_set():
                    start(down)
            write(ALIVE)
        write(OVER)

    start()
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    for process in newest:  # the ranks are guarded, and the step has its number before another one
        select.select(list(filter(None, [process.stdout])), [], [], START_PATIENCE)
    try:
        yield newest
    finally:
        stopped.set()
        thread.join(END_PATIENCE)
        for process in newest:
            try:
                process.wait(END_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()


def find_loss(node: NodeState) -> str:
    """Say what tells from outside that a node is lost; empty if nothing does."""
    if node.state.startswith("down"):
        return f"SLURM says that it is {node.state}"
    # Unless slurmctld does not reach it either, it may be cut off from this node alone.
    return UNREACHABLE if node.is_down and try_connection(node) is False else ""


def find_evidence(first: str, silence: float) -> str:
    """Say what tells from outside that the first node, which is silent, is lost; empty if nothing does."""
    try:
        evidence = find_loss(ask_nodes([first], os.environ)[first])
    except (SchedulerError, KeyError):
        return ""  # this node may be the one that is cut off
    return evidence if evidence != UNREACHABLE or silence > UNREACHABLE_FOR else ""


def end_attempt(run: RunDir, first: str, evidence: str, heard: float) -> bool:
    """End the attempt as its first node would have done; false if that is to be tried again.

    Once it is claimed, SIGTERM is ignored: the requeue ends this step, too. Raises LaunchError or OSError.
    """
    environ, manifest = os.environ, read_manifest(run.path)
    if not manifest.id:
        return False
    if manifest.last.attempt != run.first_attempt:
        return True
    attempt = Attempt(read_job_request(run.path, environ), run, environ, manifest, requeues=True)
    status, own = ask_job(attempt.job_id, environ), name_host(environ)
    if classify_kill(status, attempt.restarts):
        return True
    nodes = ask_nodes(attempt.step_hosts, environ)
    others = [host for host in nodes if host not in (first, own)]
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:  # a rack may be lost at once
        losses = zip(others, pool.map(lambda host: find_loss(nodes[host]), others), strict=True)
    lost = {first: evidence, **{host: loss for host, loss in losses if loss}}
    trouble, is_new = release_space(run), list_claims(run)[-1:] != [own]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if claim_end(run, own, lost) != own:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return False
    if is_new:
        logger.info(
            f"node {first}, which ran the batch script, is lost: {evidence}, and nothing was heard of it"
            f" for {time.monotonic() - heard:.0f} s: {own} ends the attempt in its place"
        )
    if manifest.last.outcome.state not in CLOSED:
        records = [one for one in read_nodes(run.path, run.first_attempt) if one.host in attempt.hosts]
        attempt.step = StepReport(1, records, attempt.hosts)
        end = carry_out(attempt, diagnose(attempt, status, lost, trouble))
        report_end(attempt, end)
        if end.decision.requeue:
            return True
    run_slurm(["scancel", attempt.job_id], environ)  # nothing else would end it before its time limit
    return True


def hear() -> bytes:
    """Wait for a word of the first node, for a while. Their end says nothing: srun may have died alone."""
    if not select.select([0], [], [], TICK)[0]:
        return b""
    with contextlib.suppress(OSError):
        if said := os.read(0, 1024):
            return said
    time.sleep(TICK)
    return b""


def await_loss(first: str, heard: float) -> tuple[str, float]:
    """Wait until two signs say that the first node is lost; ends this process if the attempt is over.

    The second one, from outside, is to be the same in all looks of a while. Returns it, for people, and when
    the node was last heard of.
    """
    evidence, since, due = "", 0.0, 0.0
    while True:
        began, said = time.monotonic(), hear()
        now = time.monotonic()
        if OVER in said:
            sys.exit()
        if said:
            heard = now
        elif now - began > OWN_GAP:  # this process has slept, as its machine may have
            heard = max(heard, now - ALIVE_PERIOD)
        if now - heard <= SILENCE:
            evidence, due = "", 0.0
        elif now >= due:
            before, evidence = evidence, find_evidence(first, now - heard)
            if evidence != before:
                since = now
            elif evidence and now - since >= (STEADY if evidence == UNREACHABLE else TICK):
                return evidence, heard
            due = now + RETRY if not evidence and now - heard > UNREACHABLE_FOR else 0.0


def main() -> int:
    """Watch the first node until the attempt is over."""
    set_up_logging()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, *FORWARDED):
        signal.signal(number, signal.SIG_IGN)  # those are for the ranks
    run, first = RunDir(Path(sys.argv[1]), int(os.environ[LAUNCH_ATTEMPT])), sys.argv[2]
    os.write(1, READY)
    evidence, heard = await_loss(first, time.monotonic())
    with contextlib.suppress(OSError):  # what is said from now on goes to the job's log
        path = run.path / "logs" / f"slurm-{os.environ['SLURM_JOB_ID']}.out"
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), 2)
    while True:
        try:
            if end_attempt(run, first, evidence, heard):
                return 0
        except (OSError, LaunchError) as error:
            logger.warning(f"{first} is lost, but its job cannot be ended from here: {error}")
        time.sleep(RETRY)
        if list_claims(run)[-1:] != [name_host(os.environ)]:  # else it goes on even if that node comes back
            evidence, heard = await_loss(first, heard)


if __name__ == "__main__":
    leave(main())
