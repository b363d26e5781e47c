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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue

from launcher.errors import SchedulerError
from launcher.launch.coordinator import Coordinator, GroupStart, JobEnd, Order
from launcher.launch.processes import prepare_agent
from launcher.launch.signal_channel import KILL_WAIT, LOST, make_signal_channel, write_line_to_tasks
from launcher.launch.signals import FORWARDED, STOPPING
from launcher.protocol import LAUNCH_ATTEMPT, LAUNCH_NODE_ORDER, LAUNCH_RENDEZVOUS
from launcher.runs.node_records import NodeRecord, read_nodes
from launcher.slurm.attempt import Attempt
from launcher.slurm.commands import ask_config, run_slurm
from launcher.slurm.group_messages import NodeReport, find_report, render_order
from launcher.slurm.notation import fold_in_order
from launcher.slurm.slurm_environ import clean_for_step
from launcher.slurm.srun import (
    CANCELLED,
    CPU_BIND_COMPLAINT,
    SLURM_PREFIXES,
    SRUN,
    TERMINATED,
    Container,
    Step,
    give_cpus,
    is_in_node_records,
    is_verbose,
    parse_node_failure,
    parse_task_ends,
    render_step,
)

logger = logging.getLogger(__name__)

LABEL = re.compile(r"\s*\d+: ")
"""What srun's `--label` puts before each line."""
KEPT_LINES = 40
"""Lines of srun's that are kept for the report."""
SMALL_STEP: Mapping[str, object] = {"input": "none", "gres": "none"}
"""Options of a step that needs nothing."""
LONGEST_ORDER = 120_000
"""Characters of a variable; the kernel takes 128 KiB (MAX_ARG_STRLEN). It is enough for 10,000 nodes in any
order."""
STEP_ID_CYCLE = 4
"""Attempts after which a step may have the number of an earlier one's again: by then the node that a signal
waits for has been lost for longer than several waits in the queue."""
RECORD_TIMEOUT = 5.0
"""Seconds for a short step, and for a record to come into sight of this node, on a filesystem that tells
late of new files."""
CLOSE_TIMEOUT = 5.0
"""Seconds for what is still to be written when srun has ended."""


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

    def send(self, lines: Iterable[str]) -> None:
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
    send: Callable[[Iterable[str]], None]
    """Writes lines to all tasks."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Reports come by one thread, and signals by another."""
    holds_back: Callable[[NodeReport], bool] | None = None
    """Hears each report; true if it is to be passed on later, see `NodeReplacement`."""

    def begin(self, hosts: Sequence[str], local_size: int) -> None:
        """Order the first start before any task is ready: each of these nodes will have so many ranks."""
        for host in hosts:
            self.take_report(NodeReport("ready", host, (local_size,)))

    def take_report(self, report: NodeReport) -> None:
        """Pass a task's report on, unless it is held back until more is known."""
        if self.holds_back is None or not self.holds_back(report):
            self.pass_report_on(report)

    def pass_report_on(self, report: NodeReport) -> None:
        """Tell the coordinator what a task has reported, and send the order that follows from it."""
        note, host, numbers = self.coordinator, report.host, report.numbers
        match report.kind:
            case "ready":
                self.decide(partial(note.note_ready, host, numbers[0]), host)
            case "failed":
                what = f"rank {numbers[1]} on {host} has ended"
                self.decide(partial(note.note_failure, host, numbers[0]), what)
            case "ended":
                self.decide(partial(note.note_end, host, numbers[0]), host)
            case "taken":
                what = f"{host} cannot serve the ranks' port"
                self.decide(partial(note.note_taken_port, host, numbers[0]), what)

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

    def stop(self) -> None:
        """Order no start any more: the tasks are sent a signal that ends the ranks."""
        with self.lock:
            self.coordinator.note_stop()

    def decide(self, note: Callable[[], Order | None], reason: str = "") -> None:
        """Send the order that follows from what is noted, and log another start, or why there is none."""
        coordinator = self.coordinator
        with self.lock:
            before, order = coordinator.start, note()
            if order is not None:
                self.send((render_order(order),))
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
    control: int
    """Descriptor of srun's stdin, which every task reads a copy of."""
    environ: Mapping[str, str]
    elastic: bool = False
    """The step outlives the end of a task."""
    coordinator: Coordinator | None = None
    """Decides about the starts of all nodes' ranks; None if torchrun's agents agree on them."""
    started: float = field(default_factory=time.time)
    srun_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    """srun's own lines."""
    lost: frozenset[str] = frozenset()
    """Nodes that SLURM has given up."""
    signalled: list[tuple[str, int]] = field(default_factory=list)
    """Nodes whose task, or srun (SRUN), got a signal that we have not sent, before any task had ended."""
    cancelled: bool = False
    """SLURM said that the step was cancelled, before any task had ended."""
    ended: bool = False
    """A task has ended badly, and SLURM ends the others."""
    stopped: bool = False
    """The end was asked for from here."""
    writer: TaskWriter = field(init=False)
    group: StepGroup | None = field(init=False)
    reader: threading.Thread = field(init=False)
    kill_wait_sender: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Begin to pass stderr on, and tell the tasks how long SLURM will wait for them."""
        self.writer = TaskWriter(self.control)
        self.group = StepGroup(self.coordinator, self.writer.send) if self.coordinator else None
        self.reader = threading.Thread(target=self.forward_stderr, daemon=True)
        self.kill_wait_sender = threading.Thread(target=self.send_kill_wait, daemon=True)
        self.reader.start()
        self.kill_wait_sender.start()

    def send_kill_wait(self) -> None:
        """Ask SLURM for its KillWait, once the step is on its way: the thread's body."""
        with contextlib.suppress(SchedulerError):
            if found := re.match(r"\d+", ask_config(self.environ).get("KillWait", "")):  # `30 sec`
                self.writer.send((f"{KILL_WAIT} {found[0]}",))

    def send(self, number: int) -> None:
        """Send a signal to the ranks, by way of their supervisors."""
        if number in (*STOPPING, signal.SIGKILL):
            self.stopped = True
            if self.group:
                self.group.stop()
        self.writer.send((signal.Signals(number).name,))

    def forward_stderr(self) -> None:
        """Copy the tasks' stderr to ours, and keep srun's own lines: the thread's body."""
        for raw in self.process.stderr or ():
            line = raw.decode(errors="replace").rstrip("\n")
            if found := find_report(line):
                before, report = found
                if report.kind == "signalled":
                    self.signalled += [] if self.ended else [(report.host, report.numbers[0])]
                elif self.group:
                    self.group.take_report(report)
                pass_text_on("" if LABEL.fullmatch(before) else before)
            elif not line.startswith(SLURM_PREFIXES) or self.note_line(line):
                pass_text_on(raw)

    def note_line(self, line: str) -> bool:
        """Take a line of srun's own; false if it says nothing new to people."""
        if line.startswith(TERMINATED) and not (self.ended or self.stopped):
            self.signalled.append((SRUN, signal.SIGTERM))
            self.ended = True
        if CPU_BIND_COMPLAINT in line or is_verbose(line):
            return False
        known = is_in_node_records(line, self.srun_lines)
        self.srun_lines.append(line)
        self.cancelled = self.cancelled or (CANCELLED in line and not self.ended)
        ends = parse_task_ends((line,))
        self.ended = self.ended or bool(ends and not self.elastic)
        if self.group and self.elastic:
            for host in ends:
                self.group.note_task_end(host)
        if hosts := parse_node_failure(line):
            self.lost |= {*hosts}  # a new value: another thread reads it
            if self.group:
                self.group.take_losses(sorted(self.lost))
            else:
                self.writer.send((LOST,))  # to those that can go on: of an elastic job
        return not known

    def close(self) -> None:
        """Take what is left, after srun's end."""
        self.reader.join(RECORD_TIMEOUT)
        self.kill_wait_sender.join()
        self.writer.close()
        os.close(self.control)


def pass_text_on(text: bytes | str) -> None:
    """Print what a task has printed on its stderr."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode() if isinstance(text, str) else text)


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
        options={"quiet": False, **config.cluster.srun},  # it says that it was sent SIGTERM
        container=container,
    )


def start_nodes(attempt: Attempt, endpoint: str, coordinator: Coordinator | None = None) -> NodeStep:
    """Start a task on each node, which are to meet at `endpoint`; raises OSError if there is no srun."""
    variables = {LAUNCH_ATTEMPT: str(attempt.run.first_attempt), LAUNCH_RENDEZVOUS: endpoint}
    order = fold_in_order(attempt.step_hosts)
    if len(order) <= LONGEST_ORDER:
        variables[LAUNCH_NODE_ORDER] = order
    step = describe_node_step(attempt)
    step = replace(step, options=give_cpus(step.options, attempt.environ))
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
    return NodeStep(process, writing, attempt.environ, step.elastic, coordinator)


def skip_step_ids(attempt: Attempt) -> None:
    """Use up as many numbers of steps as give this attempt's step another one than those before it had.

    Numbers begin at 0 in each attempt. slurmctld keeps a signal to a step for a node that does not answer,
    and sends it again a minute later: then the step with that number may be the next attempt's (seen with
    SLURM 22.05; the request that waits names job and step alone).
    """
    count = attempt.restarts % STEP_ID_CYCLE
    if not count:
        return
    from concurrent.futures import ThreadPoolExecutor

    step = Step(1, attempt.hosts[:1], elastic=False, directory="/", command=("true",), options=SMALL_STEP)
    argv, environ = render_step(step), clean_for_step(attempt.environ)

    def pass_one(_: int) -> None:
        with contextlib.suppress(SchedulerError):  # if no step can be started, the real one reports it
            run_slurm(argv, environ, timeout=RECORD_TIMEOUT)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(pass_one, range(count)))


def remove_caches(attempt: Attempt, hosts: Sequence[str]) -> None:
    """Remove what tasks that were killed have left on the disks of their nodes."""
    config = attempt.request.config
    if not hosts or config.cluster.container.image:
        return
    command = (sys.executable, "-P", "-m", "launcher.slurm.compiler_caches")
    step = Step(len(hosts), tuple(hosts), elastic=True, directory="/", command=command, options=SMALL_STEP)
    with contextlib.suppress(SchedulerError):  # the next task there does it then
        run_slurm(
            render_step(step), {**clean_for_step(attempt.environ), **config.env}, timeout=RECORD_TIMEOUT
        )


def collect_node_records(attempt: Attempt, step: NodeStep) -> list[NodeRecord]:
    """Return the records of the nodes with ranks; waits for late ones if srun knows of no failure."""
    run, deadline = attempt.run, time.monotonic() + RECORD_TIMEOUT
    while True:
        records = [one for one in read_nodes(run.path, run.first_attempt) if one.host in attempt.hosts]
        if len(records) >= len(attempt.hosts) or step.process.returncode or time.monotonic() > deadline:
            return records
        time.sleep(0.1)
