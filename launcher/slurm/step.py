"""A step of a job: srun's command line, what srun and the tasks say, and the running step."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from launcher.codec import dump, load
from launcher.config.settings import ContainerConfig
from launcher.launch.coordinator import Coordinator, GroupStart, JobEnd, Order
from launcher.launch.signals import LOST, STOPPING, write_line_to_tasks
from launcher.runs.records import NodeRecord, RankFailure
from launcher.slurm.commands import clean_for_step, expand_hosts

logger = logging.getLogger(__name__)

CPU_COUNTS = re.compile(r"(?:^|,)(\d+)")
"""The CPUs of nodes in SLURM_JOB_CPUS_PER_NODE, `16(x3),8`."""


# What the first node and the tasks say to each other. A report is a line of a task's stderr, which srun
# brings here; an order is a line of the tasks' stdin, which each of them reads (`launcher.launch.signals`).

MARK = "launch-task: "
"""What begins a report; what stands before it is the start of a line that somebody else has not ended."""
ORDERS: dict[str, type[GroupStart] | type[JobEnd]] = {"START": GroupStart, "END": JobEnd}
"""What a line of JSON after one of these words is."""
ASK_ALIVE = "ASK alive"
"""Each task says at once that it is there."""
ALIVE_PERIOD = 2.0
"""Seconds from one word of a task to the next, and of the first node to those that guard it."""
OWN_GAP = 4.0
"""Seconds between two looks of a process after which it has slept itself, and knows nothing of others."""
CLOSE_TIMEOUT = 5.0
"""Seconds for a short step, and for what is still to be read or written when srun has ended."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node's task tells the first node."""

    kind: str
    """`ready`, `failed`, `ended`, `taken` (the port), `alive`, `signalled` (not by the first node); the first
    node itself finds out that a node is `lost`, or its task `gone`."""
    host: str
    restart: int = 0
    """Number of the start that it is about."""
    number: int = 0
    """Of the node's ranks, if they are ready; of the rank that has failed; of the signal."""


def find_report(line: str) -> tuple[str, NodeReport] | None:
    """Return what stands before a report in a line, and the report; None if there is none."""
    before, mark, text = line.rpartition(MARK)
    with contextlib.suppress(ValueError):
        return (before, load(NodeReport, text)) if mark else None
    return None


def render_order(order: Order) -> str:
    """Return an order as a line without its end."""
    return f"{'END' if isinstance(order, JobEnd) else 'START'} {dump(order)}"


def parse_group_order(line: str) -> Order | None:
    """Read an order; None for another line, or one that is not whole."""
    word, _, text = line.partition(" ")
    with contextlib.suppress(ValueError):
        return load(ORDERS[word], text) if word in ORDERS else None
    return None


@dataclass(frozen=True, slots=True)
class Step:
    """What srun is to start: one task on each of some nodes."""

    hosts: tuple[str, ...]
    command: tuple[str, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    """The user's own (`cluster.srun`), which win."""
    elastic: bool = True
    """The step outlives the loss of a node, and of a task."""
    directory: str = "/"
    """Working directory of the tasks."""
    container: ContainerConfig | None = None
    """What the tasks run in; the run directory and the working directory are among its mounts."""

    def render(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return srun's command line in a job's environment.

        `--overlap --whole --mem=0` give each task all that the job has on its node, beside the batch script
        and whatever the user still runs there; `--cpu-bind=none` leaves the placement to the ranks, and
        `--quiet` spares the logs what srun tells of itself short of errors. A task that fails ends the
        others, by SIGTERM and, KillWait later, SIGKILL. There is no limit on the time between the first end
        and the last (`--wait`): a rank that still writes a checkpoint is not to be killed for the others'
        haste, and torchrun's agents wait for each other by themselves.

        If the user has srun bind (`cpu_bind=cores`), it binds a task of which nobody says how many CPUs it
        has to a single core, and all of the node's ranks with it. So it is told the job's CPUs on each node,
        the smallest number if they differ.
        """
        options: dict[str, object] = {
            "nodes": len(self.hosts),
            "ntasks": len(self.hosts),
            "ntasks-per-node": 1,
            "nodelist": ",".join(self.hosts),
            "whole": True,
            "overlap": True,
            "mem": 0,
            "cpu-bind": "none",
            "mpi": "none",
            "export": "ALL",
            "input": "all",
            "chdir": self.directory,
            "quiet": True,
            "kill-on-bad-exit": 0 if self.elastic else 1,
            "wait": 0,
            "no-kill": self.elastic,
        }
        box, command, words = self.container, self.command, list[str]()
        if box and box.runtime == "pyxis":
            words = box.args
            options["container-image"] = box.image
            options["container-mounts"] = ",".join(box.mounts) or None
            options["container-workdir"] = self.directory
        elif box:
            binds = [word for mount in box.mounts for word in ("--bind", mount)]
            start = ("apptainer", "exec", "--nv", *binds, "--pwd", self.directory, *box.args, str(box.image))
            command = (*start, *command)
        options |= {name.replace("_", "-"): value for name, value in self.options.items()}
        counts = [int(count) for count in CPU_COUNTS.findall(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))]
        if counts and "none" not in str(options["cpu-bind"] or "none"):
            options.setdefault("cpus-per-task", min(counts))
        argv = ["srun"]
        for name, value in options.items():  # true is `--name`; null and false are left out
            if value is not None and value is not False:
                argv.append(f"--{name}" if value is True else f"--{name}={value}")
        return (*argv, *words, *command)

    def start(self, environ: Mapping[str, str], **streams: Any) -> "subprocess.Popen[bytes]":  # noqa: ANN401 - Popen's
        """Start srun in a session of its own: a terminal's Ctrl-C is for this process alone.

        Raises OSError if there is no srun. `environ` is the job's; `streams` are further arguments of Popen.
        """
        argv, cleaned = self.render(environ), clean_for_step(environ)
        return subprocess.Popen(argv, env=cleaned, start_new_session=True, **streams)


SLURM_PREFIXES = ("srun: ", "slurmstepd")
"""Beginnings of the lines that are srun's own, or of the daemon behind a task."""
TASK_END = re.compile(r"srun: error: (?P<hosts>\S+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
"""How tasks ended; `_task_finish` in SLURM's src/srun/libsrun/launch.c. One line can tell of several."""
NODE_FAILURE = re.compile(r"srun: error: Node failure on (?P<hosts>\S+)")
"""A node that slurmctld has given up; src/api/step_launch.c."""
CANCELLED = " CANCELLED AT "
"""In slurmstepd's message on a step that was ended from outside, or by srun."""
ENDED, EXITED = "Terminated", "Exited with exit code"
"""The word on tasks that srun itself has ended because another one failed, and on those that failed."""
CPU_BIND_COMPLAINT = "cluster configuration lacks support for cpu binding"
"""srun's answer to --cpu-bind=none, even with --quiet, if no TaskPlugin can bind."""
STEP_BEGUN = re.compile(r"\btasks? \d|Node failure|slurmstepd|Job step aborted|io error")
"""In its messages on a step that has begun."""
TEMPORARY = re.compile(
    r"contact|imed out|Connection refused|temporar|busy|Zero Bytes|Memory required by task"
)
"""In its messages if slurmctld is away, or the nodes are not ready for another step."""
NOT_STARTED = "srun did not start the step"
"""How the record of a step begins that SLURM has refused."""


def has_begun(lines: Iterable[str]) -> bool:
    """Tell whether any line is about a step that has begun."""
    return any(map(STEP_BEGUN.search, lines))


def join_lines(lines: Iterable[str]) -> str:
    """Return the last of srun's lines as one, without its prefixes."""
    return "; ".join(line.removeprefix("srun: ").removeprefix("error: ") for line in [*lines][-3:])


def find_task_ends(lines: Iterable[str], hosts: Collection[str] | None = None) -> dict[str, str]:
    """Return for each host, or those of `hosts`, srun's word on how its task ended; the last line counts."""
    found = [match for line in lines if (match := TASK_END.match(line))]
    ends = {host: match["how"].strip() for match in found for host in expand_hosts(match["hosts"])}
    return {host: word for host, word in ends.items() if hosts is None or host in hosts}


def parse_node_failure(line: str) -> tuple[str, ...]:
    """Return the nodes that a line of srun's stderr says are lost; none for any other line."""
    found = NODE_FAILURE.match(line)
    with contextlib.suppress(ValueError):
        return expand_hosts(found["hosts"]) if found else ()
    return ()


FOLLOWS = re.compile(
    r"gloo/transport|lost the connection|Connection (closed|reset) by|remote process exited|Broken pipe"
    r"|ncclRemoteError|Socket (closed|Timeout)",
    re.IGNORECASE,
)
"""What ranks say that failed because another one did."""
LABEL = re.compile(r"\s*\d+: ")
"""What srun's `--label` puts before each line."""
KEPT_LINES = 40
"""Lines of srun's that are kept for the report."""


@dataclass(slots=True)
class StepReport:
    """How the step of one attempt goes and ends, as the batch script's process sees it."""

    srun_exitcode: int | None = None
    """As subprocess gives it: -n for signal n; None until the end."""
    records: Sequence[NodeRecord] = ()
    hosts: tuple[str, ...] = ()
    """Nodes of the ranks; none if the step was not started."""
    signals: list[tuple[int, float]] = field(default_factory=list)
    """Signals to the batch script's process, and when, in seconds since the epoch."""
    near_limit: bool = False
    """The ranks were sent the checkpoint signal because the time limit was near."""
    srun_lines: Sequence[str] = ()
    """srun's own last lines on stderr; a new value for each, since another thread reads it."""
    signalled: list[tuple[str, int]] = field(default_factory=list)
    """Nodes (or srun), and the stopping signals that their tasks got before any had ended; none is ours."""
    cancelled: bool = False
    """SLURM said that the step was cancelled, before any task had ended."""
    sickness: Sequence[str] = ()
    """What preflight found, if that is why the ranks were not started."""
    sick: Sequence[str] = ()
    """Nodes that the next attempt is to do without."""

    @property
    def missing(self) -> list[str]:
        """Nodes that left no record."""
        reporting = {record.host for record in self.records}
        return [host for host in self.hosts if host not in reporting]

    @property
    def stops(self) -> list[int]:
        """The signals that asked for the end."""
        return [number for number, _ in self.signals if number in STOPPING]

    @property
    def first_failure(self) -> tuple[NodeRecord, RankFailure] | None:
        """The first failure over all nodes, and its node; None if no rank failed.

        A rank that failed by itself (see `failed_by_itself`) comes before one that only followed another.
        """
        found = [(record, record.failure) for record in self.records if record.failure]
        return min(found, key=lambda one: (not failed_by_itself(one[1]), one[1].time), default=None)

    @property
    def failed(self) -> list[NodeRecord]:
        """The nodes on which a rank, or the agent, failed by itself rather than by SIGTERM."""
        failed = [record for record in self.records if record.state == "failed"]
        return [record for record in failed if not (record.failure and was_terminated(record.failure))]


def failed_by_itself(failure: RankFailure) -> bool:
    """Tell whether a rank failed by itself: not by SIGTERM, nor since it had lost another rank."""
    follows = any(FOLLOWS.search(line) for line in failure.lines)
    return not (was_terminated(failure) or (failure.exitcode > 0 and follows))


def was_terminated(failure: RankFailure) -> bool:
    """Tell whether a rank ended by SIGTERM, or as a shell says that it did (143)."""
    return failure.status == 128 + signal.SIGTERM


@dataclass(slots=True)
class NodeStep:
    """A running step whose tasks are ours: what they and srun say, and what they are sent.

    One thread reads srun's stderr. Another one writes its stdin, of which every task reads a copy: srun reads
    no further while the daemon of a node takes nothing from it.
    """

    process: "subprocess.Popen[bytes]"
    stdin: int
    report: StepReport
    elastic: bool = False
    """The step outlives the end of a task."""
    coordinator: Coordinator | None = None
    """Decides about the starts of all nodes' ranks; None if torchrun's agents agree on them."""
    holds_back: Callable[[NodeReport], bool] = lambda _: False
    """Hears each report; true if it is to be passed on later, see `NodeReplacement`."""
    lost: frozenset[str] = frozenset()
    """Nodes that SLURM has given up."""
    ended: bool = False
    """A task has ended badly, and SLURM ends the others."""
    failed_at: float | None = None
    """Monotonic time at which a task of an elastic step was first seen to have failed for good."""
    unsent: SimpleQueue[str | None] = field(default_factory=SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Of the coordinator: reports come by one thread, and signals by another."""
    threads: tuple[threading.Thread, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Begin to read and to write."""
        bodies = (self.forward_stderr, self.write_lines)
        self.threads = tuple(threading.Thread(target=body, daemon=True) for body in bodies)
        for thread in self.threads:
            thread.start()

    def write_lines(self) -> None:
        """Write what is sent until the end: a thread's body."""
        while (line := self.unsent.get()) is not None:
            write_line_to_tasks(self.stdin, line)

    def send(self, number: int) -> None:
        """Send a signal to the ranks, by way of their supervisors."""
        if self.coordinator and number in (*STOPPING, signal.SIGKILL):
            with self.lock:
                self.coordinator.stopped = True
        self.unsent.put(signal.Signals(number).name)

    def forward_stderr(self) -> None:
        """Copy the tasks' stderr to ours, and keep srun's own lines: a thread's body."""
        for raw in self.process.stderr or ():
            line, text = raw.decode(errors="replace").rstrip("\n"), raw
            if found := find_report(line):
                before, told = found
                text = b"" if LABEL.fullmatch(before) else before.encode()
                if told.kind == "signalled":
                    self.report.signalled += [] if self.ended else [(told.host, told.number)]
                elif self.coordinator and not self.holds_back(told):
                    self.take_report(told)
            elif line.startswith(SLURM_PREFIXES) and not self.note_line(line):
                continue
            with contextlib.suppress(OSError):
                os.write(2, text)

    def note_line(self, line: str) -> bool:
        """Take a line of srun's own; false if it says nothing new to people.

        The nodes' records say more, if there is a task of ours on each. A task that was killed left no
        record. That srun ends the others adds nothing to the first end.
        """
        if CPU_BIND_COMPLAINT in line:
            return False
        is_known = CANCELLED in line and any(map(TASK_END.match, self.report.srun_lines))
        if found := TASK_END.match(line):
            is_known = found["how"].startswith((ENDED, EXITED))
        self.report.srun_lines = (*self.report.srun_lines, line)[-KEPT_LINES:]
        self.report.cancelled |= CANCELLED in line and not self.ended
        ends = find_task_ends((line,))
        self.ended = self.ended or bool(ends and not self.elastic)
        for host, word in ends.items() if self.elastic else ():
            self.take_report(NodeReport("gone", host))
            if not self.failed_at and word.startswith(EXITED) and host not in dict(self.report.signalled):
                self.failed_at = time.monotonic()
        if hosts := parse_node_failure(line):
            self.lost |= {*hosts}  # a new value: another thread reads it
            for host in hosts:
                self.take_report(NodeReport("lost", host))
            if not self.coordinator:
                self.unsent.put(LOST)  # to those that can go on: of an elastic job
        return not is_known

    def take_report(self, report: NodeReport) -> None:
        """Tell the coordinator what has become of a node, and send and log the order that follows."""
        coordinator, host = self.coordinator, report.host
        if coordinator is None:
            return
        with self.lock:
            before = coordinator.start
            order = coordinator.note(report.kind, host, report.restart, report.number)
            if order is not None:
                self.unsent.put(render_order(order))
        reasons = {
            "failed": f"rank {report.number} on {host} has ended",
            "taken": f"{host} cannot serve the ranks' port",
            "lost": f"{host} was lost",
            "gone": f"the task of {host} has ended",
        }
        reason, done = reasons.get(report.kind, host), coordinator.restarts
        if isinstance(order, GroupStart) and before is not None:
            count = f" (restart {done} of {coordinator.max_restarts})" if done else ""
            logger.info(f"{reason}: all ranks start again{count}")
        elif done and order == JobEnd(failed=True):
            logger.info(f"{reason}, after {done} restarts: the job ends")

    def close(self) -> None:
        """Take what is left, after srun's end."""
        self.unsent.put(None)
        for thread in self.threads:
            thread.join(CLOSE_TIMEOUT)
        if not self.threads[1].is_alive():  # else it waits for a reader still
            os.close(self.stdin)
