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
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import LaunchError, SchedulerError
from launcher.launch.signals import FORWARDED
from launcher.protocol import LAUNCH_ATTEMPT, name_host
from launcher.runs.manifest import CLOSED, read_manifest, stamp_time, take_dict
from launcher.runs.records import read_nodes
from launcher.runs.run_directory import RunDir, release_space
from launcher.slurm.attempt import Attempt, carry_out, claim_end, report_end
from launcher.slurm.attempt_end import StepReport, classify_kill, diagnose
from launcher.slurm.commands import SHORT_TIMEOUT, ask_down_nodes, ask_job, run_slurm
from launcher.slurm.job_request import read_job_request
from launcher.slurm.node_channel import ALIVE_PERIOD, ASK_ALIVE, OWN_GAP, NodeReport
from launcher.slurm.step import NodeStep, Step
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
UNREACHABLE_FOR, STEADY = 30.0, 10.0
"""Seconds of silence, and of tries, after which a first node that takes no connections is lost, if slurmctld
does not reach it either."""
START_PATIENCE, END_PATIENCE = 5.0, 2.0
"""Seconds for the guards to start, if somebody waits for them, and to end."""
RETRY = 10.0
"""Seconds until another look if SLURM does not answer, or another node ends the attempt."""


def ask_addresses(hosts: Sequence[str], environ: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Ask SLURM where the nodes' daemons listen, by address and port; raises SchedulerError."""

    def ask(*words: str) -> str:
        return run_slurm(["scontrol", *words], environ, timeout=SHORT_TIMEOUT)

    text = ask("--oneliner", "show", "node", ",".join(hosts)) if hosts else ""
    # A reason, at the end, can hold anything: of a word that comes twice the first counts.
    lines = [dict(reversed(re.findall(r"(?:^|\s)(\w+)=(\S+)", line))) for line in text.splitlines()]
    default = "6818"
    if not all("Port" in fields for fields in lines):  # a node has none there with the default one
        found = re.search(r"^SlurmdPort\s*=\s*(\d+)", ask("show", "config"), re.MULTILINE)
        default = found[1] if found else default
    return {
        fields["NodeName"]: (fields["NodeAddr"], int(fields.get("Port", default)))
        for fields in lines
        if "NodeAddr" in fields
    }


def try_connection(where: tuple[str, int]) -> bool | None:
    """Tell whether a node takes a connection to its slurmd; None if that says nothing about the node."""
    try:
        with socket.create_connection(where, CONNECT_TIMEOUT):
            return True
    except TimeoutError:
        return False
    except OSError as error:
        return False if error.errno in UNREACHABLE_ERRORS else None


@dataclass(slots=True)
class NodeSigns:
    """What is known of one node."""

    heard: float
    """When its task was last heard of; the beginning, if it never was."""
    has_spoken: bool = False
    unreachable: int = 0
    """Connections in a row that have failed."""


@dataclass(slots=True)
class Liveness:
    """The signs of all nodes of a job."""

    hosts: tuple[str, ...]
    now: float
    """The last look, and at first the beginning."""
    doubted: float | None = None
    """When a rank failed, so that each node is to be heard from again."""
    lost: set[str] = field(default_factory=set)
    signs: dict[str, NodeSigns] = field(init=False)

    def __post_init__(self) -> None:
        """Count from the beginning."""
        self.signs = {host: NodeSigns(self.now) for host in self.hosts}

    def note_heard(self, host: str, now: float) -> None:
        """Take a word of a node's task."""
        if host in self.signs:
            self.signs[host] = NodeSigns(now, has_spoken=True)

    def note_failure(self, now: float) -> None:
        """Take that a rank has failed: a node that is silent from now on may be why."""
        self.doubted = now

    def note_look(self, now: float) -> None:
        """Take that the caller looks again; if it has slept, as its machine may have, all begins again."""
        if now - self.now > OWN_GAP:
            for signs in self.signs.values():
                signs.heard, signs.unreachable = max(signs.heard, now - ALIVE_PERIOD), 0
            self.doubted = None if self.doubted is None else now
        self.now = now

    def list_suspects(self) -> list[str]:
        """Return the nodes that have been silent for longer than a sound one is, and are to be tried."""
        suspects = []
        for host, signs in self.signs.items():
            is_late = self.now - signs.heard > (SILENCE if signs.has_spoken else BEGINNING)
            if signs.has_spoken and self.doubted is not None:
                is_late = is_late or signs.heard < self.doubted < self.now - DOUBT
            if is_late and host not in self.lost:
                suspects.append(host)
        return suspects

    def note_connection(self, host: str, *, is_open: bool) -> None:
        """Take how an attempt to connect to a suspect's daemon went."""
        self.signs[host].unreachable = 0 if is_open else self.signs[host].unreachable + 1

    def take_losses(self) -> dict[str, float]:
        """Return the suspects that are lost by now, each once, and the seconds since their last word."""
        found = {
            host: self.now - self.signs[host].heard
            for host in self.list_suspects()
            if self.signs[host].unreachable >= MAX_UNREACHABLE
        }
        self.lost |= {*found}
        return found

    def has_heard_all(self, hosts: Iterable[str], since: float) -> bool:
        """Tell whether each of these nodes was heard of after a time, or is lost."""
        return all(host in self.lost or self.signs[host].heard > since for host in hosts)


@dataclass(slots=True)
class NodeReplacement:
    """Hears a step's tasks, tries nodes that fall silent, and has spare ones take the place of those lost.

    A failure is held back until each node was heard of after it: a lost node may be why. `attend` is called
    again and again by the process that writes the manifest; a thread of its own tries the nodes.
    """

    attempt: Attempt
    step: NodeStep
    hosts: tuple[str, ...] = field(init=False)
    liveness: Liveness = field(init=False)
    held: list[tuple[float, NodeReport]] = field(default_factory=list)
    """Failures, and when they came."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Of these two."""
    addresses: dict[str, tuple[str, int]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    """Nodes that fell silent, and for how many seconds."""
    ended_at: float | None = None
    """Monotonic time at which all tasks that are left were over."""
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Begin to watch."""
        self.hosts = self.attempt.step_hosts
        self.liveness = Liveness(self.hosts, time.monotonic())
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
                self.liveness.note_failure(now)
                self.step.unsent.put(ASK_ALIVE)
        self.pass_failures_on(now)
        return is_failure

    def pass_failures_on(self, now: float) -> None:
        """Pass on the failures after which each node was heard of, or that have waited for long."""
        with self.lock:
            over = [
                (when, report)
                for when, report in self.held
                if now - when > LONGEST_HOLD or self.liveness.has_heard_all(self.hosts, when)
            ]
            self.held = [item for item in self.held if item not in over]
        for _, report in over:
            self.step.take_report(report)

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
            self.pass_failures_on(time.monotonic())

    def try_nodes(self, suspects: list[str], own: str) -> dict[str, bool]:
        """Connect to suspects, and return which take it; none of them if this node is cut off."""
        witness = next((host for host in self.hosts if host not in suspects), own)
        with contextlib.suppress(SchedulerError):
            missing = [host for host in (*suspects, witness) if host not in self.addresses]
            self.addresses |= ask_addresses(missing, self.attempt.environ)
        known = [host for host in (witness, *suspects) if host in self.addresses]
        with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
            answers = pool.map(lambda host: try_connection(self.addresses[host]), known)
            found = dict(zip(known, answers, strict=True))
        if not found.get(witness):
            return {}
        return {host: is_open for host in suspects if (is_open := found.get(host)) is not None}

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
                attempt.manifest.setdefault("replacements", []).append(account)
        attempt.manifest["hosts"] = list(hosts)
        if spares != [*attempt.spares]:
            attempt.manifest["spares"] = spares
            attempt.write()
        if not (self.losses or self.step.lost) or not coordinator.is_over:
            return
        # Every node that takes part, and is not lost, has left its record.
        records = {record.host for record in read_nodes(attempt.run.path, attempt.run.first_attempt)}
        if {*attempt.hosts} <= records | coordinator.lost:
            self.ended_at = self.ended_at or time.monotonic()
            if time.monotonic() > self.ended_at + END_GRACE:
                self.step.process.kill()

    def close(self) -> None:
        """End the watch, and complete the account."""
        self.stopped.set()
        self.attend()


# The first node


@contextlib.contextmanager
def start_guards(attempt: Attempt) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Have other nodes watch this one; gives the sruns of that, which grow by one if SLURM ends the step.

    A thread tells the guards again and again that this node is there. As this process dies, srun is not asked
    to end them, too.
    """
    own = name_host(attempt.environ)
    others = [host for host in attempt.step_hosts if host != own]
    command = (sys.executable, "-P", "-m", "launcher.slurm.lost_nodes", str(attempt.run.path), own)
    step = Step(tuple(others[:: -(-len(others) // MOST_GUARDS)]), command, {"gres": "none"})
    environ, pipe = {**attempt.environ, LAUNCH_ATTEMPT: str(attempt.run.first_attempt)}, subprocess.PIPE
    started, stopped = list["subprocess.Popen[bytes]"](), threading.Event()

    def start() -> None:
        with contextlib.suppress(OSError):  # the step of the ranks tells
            started.append(step.start(environ, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL))

    def tell() -> None:
        pause = ALIVE_PERIOD
        while started and not stopped.wait(pause):
            pause = ALIVE_PERIOD
            if started[-1].poll() is not None:  # as SLURM 22.05 does if a node has just come back
                start()
                pause = RETRY
            write(ALIVE)
        write(OVER)

    def write(word: bytes) -> None:
        with contextlib.suppress(OSError):
            if started and (stdin := started[-1].stdin):
                stdin.write(word)
                stdin.flush()

    start()
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    if (
        started and started[0].stdout and attempt.restarts
    ):  # the step is to have its number before another one
        select.select([started[0].stdout], [], [], START_PATIENCE)
    try:
        yield started
    finally:
        stopped.set()
        thread.join(END_PATIENCE)
        for process in started[-1:]:
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
        while self.heard < began:
            state = ask_down_nodes([self.first], os.environ).get(self.first, "")
            if state.startswith("down"):
                return f"SLURM says that it is {state}" if self.heard < began else ""
            try:
                address = ask_addresses([self.first], os.environ)[self.first]
            except (SchedulerError, KeyError):
                break  # this node may be the one that is cut off
            if try_connection(address) is not False:
                break
            if time.monotonic() > max(self.heard + UNREACHABLE_FOR, began + STEADY):
                return UNREACHABLE if state else ""  # it may be cut off from this node alone
            time.sleep(TICK)
        return ""

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
        down, addresses = (
            ask_down_nodes(attempt.step_hosts, environ),
            ask_addresses(attempt.step_hosts, environ),
        )
        lost = {self.first: evidence}
        for host in attempt.step_hosts:
            if down.get(host, "").startswith("down"):
                lost.setdefault(host, f"SLURM says that it is {down[host]}")
            elif host in addresses and try_connection(addresses[host]) is False:
                lost.setdefault(host, UNREACHABLE)
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
            end = carry_out(attempt, diagnose(attempt, report, status, lost, trouble))
            report_end(attempt, end)
            if end.decision.requeue:
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
