"""The step of a job: srun with one task of ours on each node."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from launcher.errors import SchedulerError
from launcher.launch.coordinator import Coordinator, GroupStart, JobEnd, Order
from launcher.launch.processes import prepare_agent
from launcher.launch.signals import (
    FORWARDED,
    KILL_WAIT,
    LOST,
    STOPPING,
    make_signal_channel,
    write_line_to_tasks,
)
from launcher.protocol import LAUNCH_ATTEMPT, LAUNCH_NODE_ORDER, LAUNCH_RENDEZVOUS
from launcher.slurm.attempt import Attempt
from launcher.slurm.commands import ask_config
from launcher.slurm.node_channel import NodeReport, find_report, render_order
from launcher.slurm.notation import fold_in_order
from launcher.slurm.slurm_environ import clean_for_step
from launcher.slurm.srun import (
    CANCELLED,
    CPU_BIND_COMPLAINT,
    SLURM_PREFIXES,
    Container,
    Step,
    find_task_ends,
    give_cpus,
    is_in_node_records,
    parse_node_failure,
    render_step,
)

logger = logging.getLogger(__name__)

LABEL = re.compile(r"\s*\d+: ")
"""What srun's `--label` puts before each line."""
KEPT_LINES = 40
"""Lines of srun's that are kept for the report."""
LONGEST_ORDER = 120_000
"""Characters of a variable; the kernel takes 128 KiB (MAX_ARG_STRLEN). It is enough for 10,000 nodes in any
order."""
STEP_ID_CYCLE = 4
"""Attempts after which a step may have the number of an earlier one's again: by then the node that a signal
waits for has been lost for longer than several waits in the queue."""
CLOSE_TIMEOUT = 5.0
"""Seconds for a short step, and for what is still to be read or written when srun has ended."""


class TaskWriter:
    """Keeps lines whole and in their order, whichever thread sends them.

    srun reads no further while the daemon of a node takes nothing from it: whoever wrote to it directly would
    wait too.
    """

    def __init__(self, descriptor: int) -> None:
        """Write to a descriptor, which is closed by others."""
        self.descriptor = descriptor
        self.lines: SimpleQueue[str | None] = SimpleQueue()
        self.thread = threading.Thread(target=self.write_lines, daemon=True)
        self.thread.start()

    def send(self, *lines: str) -> None:
        """Write lines as soon as possible; nothing happens if the tasks are gone."""
        for line in lines:
            self.lines.put(line)

    def write_lines(self) -> None:
        """Write what is sent until the end: the thread's body."""
        while (line := self.lines.get()) is not None:
            write_line_to_tasks(self.descriptor, line)

    def close(self) -> bool:
        """Write what is left; False if nobody reads it, and the thread still waits."""
        self.lines.put(None)
        self.thread.join(CLOSE_TIMEOUT)
        return not self.thread.is_alive()


@dataclass(slots=True)
class StepGroup:
    """Tells the coordinator what happens, and sends its orders to all tasks."""

    coordinator: Coordinator
    send: Callable[..., None]
    """Writes lines to all tasks."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Reports come by one thread, and signals by another."""
    holds_back: Callable[[NodeReport], bool] = lambda _: False
    """Hears each report; true if it is to be passed on later, see `NodeReplacement`."""

    def take_report(self, report: NodeReport) -> None:
        """Pass a task's report on, unless it is held back until more is known."""
        if not self.holds_back(report):
            self.pass_report_on(report)

    def pass_report_on(self, report: NodeReport) -> None:
        """Tell the coordinator what a task has reported, and send the order that follows from it."""
        host = report.host
        reasons = {
            "failed": f"rank {report.number} on {host} has ended",
            "taken": f"{host} cannot serve the ranks' port",
        }
        note = partial(self.coordinator.note, report.kind, host, report.restart, report.number)
        self.decide(note, reasons.get(report.kind, host))

    def take_losses(self, hosts: Iterable[str]) -> None:
        """Take that nodes are lost, and send the order that follows."""
        for host in hosts:
            self.decide(partial(self.coordinator.note_loss, host), f"{host} was lost")

    def note_task_end(self, host: str) -> None:
        """Take that a node's task has ended badly by itself; a step without spare nodes ends by that.

        A spare node without its task is none any more.
        """
        note = self.coordinator

        def end() -> Order | None:
            takes_part = note.start is None or note.start.find_group_rank(host) is not None
            if note.is_over or host in note.lost:
                return None
            return note.finish(failed=True) if takes_part else note.note_loss(host)

        self.decide(end)

    def drop_spare(self, host: str) -> None:
        """Do without a spare node, unless it has taken another's place already."""
        note = self.coordinator
        self.decide(lambda: note.note_loss(host) if host in note.spares or host not in note.sizes else None)

    def decide(self, note: Callable[[], Order | None], reason: str = "") -> None:
        """Send the order that follows from what is noted, and log another start, or why there is none."""
        coordinator = self.coordinator
        with self.lock:
            before, order = coordinator.start, note()
            if order is not None:
                self.send(render_order(order))
        done = coordinator.restarts
        if reason and isinstance(order, GroupStart) and before is not None:
            count = f" (restart {done} of {coordinator.max_restarts})" if done else ""
            logger.info(f"{reason}: all ranks start anew{count}")
        elif reason and done and order == JobEnd(failed=True):
            logger.info(f"{reason}, after {done} restarts: the job ends")


@dataclass(slots=True)
class NodeStep:
    """A running step whose tasks are ours."""

    process: "subprocess.Popen[bytes]"
    writer: TaskWriter
    """Writes to srun's stdin, which every task reads a copy of."""
    elastic: bool = False
    """The step outlives the end of a task."""
    group: StepGroup | None = None
    """Decides about the starts of all nodes' ranks; None if torchrun's agents agree on them."""
    srun_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    """srun's own lines."""
    lost: frozenset[str] = frozenset()
    """Nodes that SLURM has given up."""
    signalled: list[tuple[str, int]] = field(default_factory=list)
    """Nodes whose task got a signal that we have not sent, before any task had ended."""
    cancelled: bool = False
    """SLURM said that the step was cancelled, before any task had ended."""
    ended: bool = False
    """A task has ended badly, and SLURM ends the others."""
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Begin to pass stderr on."""
        self.reader = threading.Thread(target=self.forward_stderr, daemon=True)
        self.reader.start()

    def send(self, number: int) -> None:
        """Send a signal to the ranks, by way of their supervisors."""
        if self.group and number in (*STOPPING, signal.SIGKILL):
            with self.group.lock:
                self.group.coordinator.note_stop()
        self.writer.send(signal.Signals(number).name)

    def forward_stderr(self) -> None:
        """Copy the tasks' stderr to ours, and keep srun's own lines: the thread's body."""
        for raw in self.process.stderr or ():
            line, text = raw.decode(errors="replace").rstrip("\n"), raw
            if found := find_report(line):
                before, report = found
                text = b"" if LABEL.fullmatch(before) else before.encode()
                if report.kind == "signalled":
                    self.signalled += [] if self.ended else [(report.host, report.number)]
                elif self.group:
                    self.group.take_report(report)
            elif line.startswith(SLURM_PREFIXES) and not self.note_line(line):
                continue
            with contextlib.suppress(OSError):
                os.write(2, text)

    def note_line(self, line: str) -> bool:
        """Take a line of srun's own; false if it says nothing new to people."""
        if CPU_BIND_COMPLAINT in line:
            return False
        known = is_in_node_records(line, self.srun_lines)
        self.srun_lines.append(line)
        self.cancelled = self.cancelled or (CANCELLED in line and not self.ended)
        ends = find_task_ends((line,))
        self.ended = self.ended or bool(ends and not self.elastic)
        if self.group and self.elastic:
            for host in ends:
                self.group.note_task_end(host)
        if hosts := parse_node_failure(line):
            self.lost |= {*hosts}  # a new value: another thread reads it
            if self.group:
                self.group.take_losses(sorted(self.lost))
            else:
                self.writer.send(LOST)  # to those that can go on: of an elastic job
        return not known

    def close(self) -> None:
        """Take what is left, after srun's end."""
        self.reader.join(CLOSE_TIMEOUT)
        if self.writer.close():
            os.close(self.writer.descriptor)


def describe_node_step(attempt: Attempt) -> Step:
    """Return the step over the nodes of an attempt."""
    request = attempt.request
    config = request.config
    box = config.cluster.container
    # As the batch script starts this process: PYTHONPATH may name the working directory, and is for ranks.
    isolation = "-I" if sys.flags.isolated and not box.image else "-P"
    run_path, directory = attempt.run.path, request.directory
    container = None
    if box.image:
        mounts = (f"{run_path}:{run_path}", f"{directory}:{directory}", *box.mounts)
        container = Container(box.runtime, box.image, mounts, tuple(box.args))
    return Step(
        nodes=len(attempt.step_hosts),
        nodelist=attempt.step_hosts,
        elastic=attempt.is_elastic or bool(attempt.spares),
        directory=directory,
        command=(
            box.python if box.image else sys.executable,
            *(isolation, "-m", "launcher.slurm.task", str(run_path)),
        ),
        options=give_cpus(config.cluster.srun, attempt.environ),
        container=container,
    )


def start_nodes(attempt: Attempt, endpoint: str, coordinator: Coordinator | None = None) -> NodeStep:
    """Start a task on each node, which are to meet at `endpoint`; raises OSError if there is no srun."""
    variables = {LAUNCH_ATTEMPT: str(attempt.run.first_attempt), LAUNCH_RENDEZVOUS: endpoint}
    order = fold_in_order(attempt.step_hosts)
    if len(order) <= LONGEST_ORDER:
        variables[LAUNCH_NODE_ORDER] = order
    step = describe_node_step(attempt)
    reading, writing = make_signal_channel()
    parent = os.getpid()
    try:
        process = subprocess.Popen(
            render_step(step),
            env={**clean_for_step(attempt.environ), **variables},
            stdin=reading,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for this process alone
            preexec_fn=lambda: prepare_agent(parent, FORWARDED),  # noqa: PLW1509 - no other thread forks here
        )
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    writer = TaskWriter(writing)

    def send_kill_wait() -> None:
        """Tell the tasks how long SLURM will wait for them (`30 sec`), once the step is on its way."""
        with contextlib.suppress(SchedulerError):
            if found := re.match(r"\d+", ask_config(attempt.environ).get("KillWait", "")):
                writer.send(f"{KILL_WAIT} {found[0]}")

    threading.Thread(target=send_kill_wait, daemon=True).start()
    group = StepGroup(coordinator, writer.send) if coordinator else None
    return NodeStep(process, writer, step.elastic, group)


def skip_step_ids(attempt: Attempt) -> None:
    """Use up as many numbers of steps as give this attempt's step another one than those before it had.

    Numbers begin at 0 in each attempt. slurmctld keeps a signal to a step for a node that does not answer,
    and sends it again a minute later: then the step with that number may be the next attempt's (seen with
    SLURM 22.05; the request that waits names job and step alone).
    """
    options = {"input": "none", "gres": "none"}
    argv = render_step(Step(1, attempt.hosts[:1], False, "/", ("true",), options))
    environ, null, deadline = (
        clean_for_step(attempt.environ),
        subprocess.DEVNULL,
        time.monotonic() + CLOSE_TIMEOUT,
    )
    steps = [
        subprocess.Popen(argv, env=environ, stdin=null, stdout=null, stderr=null)
        for _ in range(attempt.restarts % STEP_ID_CYCLE)
    ]
    for step in steps:
        try:  # if no step can be started, the real one reports it
            step.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            step.kill()
