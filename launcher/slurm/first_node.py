"""An attempt of a SLURM job, on its first node or in its user's shell: its steps, and its signals."""

import contextlib
import errno
import logging
import os
import select
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.config.start import parse_endpoint
from launcher.errors import EXIT_MACHINE, EXIT_SCHEDULER, LaunchError, MachineError, SchedulerError
from launcher.files import open_below
from launcher.launch.coordinator import Coordinator
from launcher.launch.job import choose_restarts, is_port_free, list_ports, read_client_ports
from launcher.launch.processes import adopt_orphans, end_leftovers, prepare_agent
from launcher.launch.signals import (
    FORWARDED,
    KILL_GRACE,
    STOPPING,
    SignalQueue,
    StopStages,
    catch_signals,
    make_signal_channel,
    name_signal,
)
from launcher.protocol import LAUNCH_ATTEMPT, LAUNCH_NODE_ORDER, LAUNCH_RENDEZVOUS
from launcher.runs.provenance import describe_sources
from launcher.runs.records import read_nodes, refuse_node
from launcher.runs.run_directory import RunDir, explain_write_error, open_run_dir
from launcher.slurm import commands
from launcher.slurm.attempt import Attempt, end_attempt, is_taken_over, prepare_for_kill, start_attempt
from launcher.slurm.attempt_end import StepReport, choose_stop_time
from launcher.slurm.job_request import JobRequest, read_job_request
from launcher.slurm.node_channel import CLOSE_TIMEOUT, OWN_GAP
from launcher.slurm.node_order import NodeOrder, find_node_order
from launcher.slurm.step import NOT_STARTED, TEMPORARY, NodeStep, Step, has_begun, join_lines

logger = logging.getLogger(__name__)

RETRY = 5.0
"""Seconds until the next try, if slurmctld is away or the nodes are not ready for another step."""
REFUSALS = 5
"""Tries of which slurmctld itself says that the nodes are not ready."""
RECORD_TIMEOUT = 5.0
"""Seconds for a record to come into sight of this node, on a filesystem that tells late of new files."""
TICK = 1.0
"""Seconds between two looks at clocks and records."""
SRUN_GRACE = 10.0
"""Seconds that srun has to end a step that did not end by itself."""
ELASTIC_GRACE = 30.0
"""Seconds that the other nodes have to see by themselves that one of them has failed for good."""
LONGEST_ORDER = 120_000
"""Characters of a variable; the kernel takes 128 KiB (MAX_ARG_STRLEN). It is enough for 10,000 nodes in any
order."""
STEP_ID_CYCLE = 4
"""Attempts after which a step may have the number of an earlier one's again: by then the node that a signal
waits for has been lost for longer than several waits in the queue."""


def run_batch_script(run_path: Path) -> int:
    """Run one attempt of a submitted job and return its exit code; raises LaunchError."""
    request = read_job_request(run_path, os.environ)
    try:
        run = open_run_dir(run_path, None)
    except OSError as error:
        raise MachineError(
            f"{os.uname().nodename} cannot write the run directory, {error.filename} ({error.strerror}):"
            " runs_dir=DIR chooses one on a filesystem that all nodes share"
        ) from None
    return run_attempt(request, run, os.environ, requeues=True)


def order_job_nodes(environ: Mapping[str, str], request: JobRequest) -> NodeOrder:
    """Return the nodes to run on and the spare ones, in the order of their ranks; raises MachineError."""
    cluster = request.config.cluster
    hosts = commands.list_job_hosts(environ)[: request.max_nodes + cluster.spares]
    return find_node_order(cluster.node_order, hosts, environ, request.directory)


def report_node_order(order: NodeOrder) -> None:
    """Say in which order the nodes have their ranks if that is not SLURM's own, and what is wrong with it."""
    for warning in order.warnings:
        logger.warning(f"node order: {warning}")
    if order.source != "slurm":
        logger.info(f"ranks are in the order of {order.why}: {commands.fold_in_order(order.hosts)}")


def run_attempt(request: JobRequest, run: RunDir, environ: Mapping[str, str], *, requeues: bool) -> int:
    """Run one attempt to its end and return the exit code; raises LaunchError before it starts."""
    order = order_job_nodes(environ, request)
    adopt_orphans()
    checkpoint, _ = commands.parse_signal(request.config.cluster.signal)
    with catch_signals((checkpoint,)) as inbox, contextlib.ExitStack() as stack:
        attempt = start_attempt(request, run, environ, order, requeues=requeues)
        report_node_order(order)
        first, guards = FirstNode(attempt, inbox), list["subprocess.Popen[bytes]"]()
        try:
            if attempt.is_guarded and len(attempt.step_hosts) > 1:
                from launcher.slurm.lost_nodes import start_guards  # few jobs have use for it

                guards = stack.enter_context(start_guards(attempt))
            os.close(open_below(run.path, "logs", str(run.first_attempt)))
            skip_step_ids(attempt)
            report = first.check_nodes() or first.run_steps()
        except OSError as error:
            status, reason = EXIT_MACHINE, f"the step could not be started ({error})"
            if error.filename == "srun":
                fix = ": load SLURM's module, as cluster.setup can" if error.errno == errno.ENOENT else ""
                status, reason = EXIT_SCHEDULER, f"srun cannot be run ({error.strerror}){fix}"
            elif error.errno in (errno.ENOSPC, errno.EDQUOT):
                reason = explain_write_error(run, error)
            report = first.refuse(reason, status)
        except LaunchError as error:
            report = first.refuse(str(error), error.exit_code)
        finally:
            end_leftovers(KILL_GRACE, [guard.pid for guard in guards])
        return end_attempt(attempt, report)


@dataclass(slots=True)
class FirstNode:
    """The batch script's process during an attempt: its steps, the signals that it got, a stop's stages."""

    attempt: Attempt
    inbox: SignalQueue
    signals: list[tuple[int, float]] = field(default_factory=list)
    """What came, and when, in seconds since the epoch."""
    deferred: list[int] = field(default_factory=list)
    """Signals for the ranks that came before there were any."""
    stop: StopStages | None = None
    stop_at: float | None = None
    """When the ranks are to be stopped before the time limit, in seconds since the epoch."""

    def refuse(self, reason: str, status: int) -> StepReport:
        """Return the report of a step that there is none of, with a record of ours that says why."""
        record = refuse_node(self.attempt.hosts[0], 0, status, reason, time.time())
        return StepReport(status, (record,), signals=tuple(self.signals))

    def check_nodes(self) -> StepReport | None:
        """Check the nodes if that is wanted; returns the attempt's end if the ranks are not to start.

        `preflight.kind=auto` is light for a job with GPUs. A mistake of the checks' own ends no job.
        """
        kind = self.attempt.request.config.preflight.kind
        if kind == "auto":
            kind = "light" if commands.count_gpus(self.attempt.environ) else "off"
        if kind == "off":
            return None
        from launcher.slurm.preflight import run_preflight  # most jobs on CPUs have no use for it

        try:
            return run_preflight(self, kind)
        except Exception as error:
            logger.warning(f"preflight failed ({type(error).__name__}: {error}): report it")
            return None

    def run_steps(self) -> StepReport:
        """Run the step, again while slurmctld is away or the nodes are not ready for it."""
        attempt, refused = self.attempt, 0
        while True:
            if self.take_early_signals():
                report = StepReport(1, signals=tuple(self.signals))
                return replace(report, srun_exitcode=128 + report.stops[0])
            if is_taken_over(attempt.run):
                return self.refuse("another node has ended this attempt", EXIT_MACHINE)
            report = self.run_step()
            refusal = "".join(record.agent_said for record in report.records)
            if self.signals or not refusal.startswith(NOT_STARTED):
                return report
            is_away = False
            try:
                commands.ask_job(attempt.job_id, attempt.environ)
            except SchedulerError as error:  # it answers nobody: what srun says then can have any words
                is_away = not isinstance(error, commands.MissingCommandError)
            refused += not is_away
            if not is_away and (refused >= REFUSALS or not TEMPORARY.search(refusal)):
                return report
            until = "until slurmctld answers, " if is_away else ""
            logger.warning(f"{refusal}: {until}it is tried again")
            self.poll(RETRY)
            self.take_early_signals()

    def make_coordinator(self, endpoint: str, port: Callable[[int], int]) -> Coordinator | None:
        """Return what decides about the starts of ranks, if that is not torchrun.

        The ranks of the first start meet at `endpoint`; `port` gives the later starts theirs by their number.
        A node that replaces the first one is called as SLURM calls it.
        """
        attempt, config = self.attempt, self.attempt.request.config
        if attempt.request.agent != "direct":
            return None
        (address, first_port), first = parse_endpoint(endpoint), attempt.hosts[0]

        def find_endpoint(host: str, restart: int) -> tuple[str, int]:
            return (address if host == first else host), (port(restart) if restart else first_port)

        restarts = choose_restarts(config, attempt.environ) or 0
        return Coordinator(attempt.step_hosts, len(attempt.hosts), restarts, find_endpoint)

    def run_step(self) -> StepReport:
        """Run the step of a task on each node, which starts its ranks and writes the node's record."""
        attempt, run, first = self.attempt, self.attempt.run, self.attempt.hosts[0]
        local, salt = read_client_ports(), 0 if attempt.requeues else zlib.crc32(os.fsencode(run.path))
        job = int(attempt.environ.get("SLURM_JOB_ID", "0")) + salt

        def port(restart: int) -> int:
            found = [pick_port(job, run.first_attempt, trial, local, restart) for trial in range(TRIALS)]
            # This may be a login node with `salloc`, rather than the node that serves the rendezvous.
            is_here = restart == 0 and first == attempt.environ.get("SLURMD_NODENAME")
            return next(filter(is_port_free, found), found[0]) if is_here else found[0]

        endpoint = attempt.request.config.rdzv_endpoint or f"{first}:{port(0)}"
        step = start_nodes(attempt, endpoint, self.make_coordinator(endpoint, port))
        if "git" not in attempt.manifest:  # else the submission has told of the sources
            attempt.manifest.update(describe_sources(Path(attempt.request.directory)))
        if step.coordinator and attempt.spares:
            from launcher.slurm.lost_nodes import NodeReplacement  # most jobs have no use for it

            replacement = NodeReplacement(attempt, step)
            try:
                self.run_to_end(step, replacement.attend)
            finally:
                replacement.close()
        else:
            self.run_to_end(step)
        step.close()
        code, lines = step.process.returncode, tuple(step.srun_lines)
        deadline = time.monotonic() + RECORD_TIMEOUT
        while True:  # records may come late if srun knows of no failure
            records = [one for one in read_nodes(run.path, run.first_attempt) if one.host in attempt.hosts]
            if len(records) >= len(attempt.hosts) or code or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        # If no task ever ran, no node was lost: SLURM refused the step.
        if not records and not self.signals and code < 0:
            return self.refuse(f"srun was ended by {name_signal(-code)}, and its step", 128 - code)
        if not records and not self.signals and code and not has_begun(lines):
            words = join_lines(lines) or "it printed nothing"
            return self.refuse(f"{NOT_STARTED} (code {code}): {words}", EXIT_SCHEDULER)
        return StepReport(
            code,
            tuple(records),
            attempt.hosts,
            tuple(self.signals),
            self.stop_at is not None,
            lines,
            tuple(step.signalled),
            step.cancelled,
        )

    def run_to_end(self, step: NodeStep, attend: Callable[[], None] = lambda: None) -> None:
        """Stay with a step to its end; `attend` is called again and again."""
        for number in self.deferred:
            self.pass_on(number, step)
        self.deferred.clear()
        pidfd = os.pidfd_open(step.process.pid)
        try:
            while step.process.poll() is None:
                began = time.monotonic()
                self.poll(TICK, pidfd)
                if time.monotonic() - began > OWN_GAP and is_taken_over(self.attempt.run):
                    logger.info("this node was taken for lost while it slept: its ranks are killed")
                    step.send(signal.SIGKILL)
                    self.stop = StopStages([], time.monotonic() + KILL_GRACE)
                for number in self.inbox.take():
                    self.signals.append((number, time.time()))
                    if number not in STOPPING:
                        self.pass_on(number, step)
                        continue
                    if number == signal.SIGTERM:
                        prepare_for_kill(self.attempt)
                    if self.attempt.prepared is None:  # else SLURM has told the ranks, and KillWait runs
                        self.advance_stop(number, step)
                attend()
                now, failed_at = time.monotonic(), step.failed_at
                if self.stop:
                    if now >= self.stop.deadline:
                        self.advance_stop(signal.SIGTERM, step)
                elif self.stop_at and time.time() >= self.stop_at:
                    logger.info("the time limit is near")
                    self.advance_stop(signal.SIGTERM, step)
                elif failed_at and self.attempt.is_elastic and now > failed_at + ELASTIC_GRACE:
                    self.advance_stop(signal.SIGTERM, step)  # other ranks may wait for it in a collective
        finally:
            os.close(pidfd)

    def poll(self, seconds: float, *others: int) -> None:
        """Let time pass; a signal ends that, or another descriptor."""
        poller = select.poll()
        for descriptor in (self.inbox.wakeup, *others):
            poller.register(descriptor, select.POLLIN)
        poller.poll(seconds * 1000)

    def take_early_signals(self) -> bool:
        """Take the signals that came before the ranks' step; tell whether one of them ends the attempt."""
        taken = self.inbox.take()
        self.signals += [(number, time.time()) for number in taken]
        self.deferred += [number for number in taken if number not in STOPPING]
        if signal.SIGTERM in taken:
            prepare_for_kill(self.attempt)
        return any(number in STOPPING for number, _ in self.signals)

    def pass_on(self, number: int, step: NodeStep) -> None:
        """Send the ranks a signal that does not stop them; theirs may be the time limit's."""
        step.send(number)
        config = self.attempt.request.config
        checkpoint, seconds = commands.parse_signal(config.cluster.signal)
        if number == checkpoint:
            now, status = time.time(), self.attempt.ask_status(commands.SHORT_TIMEOUT)
            end_time, grace = status.end_time if status else None, config.torchrun.shutdown_timeout
            self.stop_at = choose_stop_time(now, end_time, seconds, grace)

    def advance_stop(self, number: int, step: NodeStep) -> None:
        """Enter the next stage of ending the step: the signal, SIGTERM, SIGKILL, and then srun's own ways."""
        grace = self.attempt.request.config.torchrun.shutdown_timeout
        self.stop = self.stop or StopStages.begin(number, grace)
        if self.stop.current is None and self.stop.deadline:  # srun was asked before
            step.process.kill()
        elif (stage := self.stop.next_stage()) is None:
            step.process.terminate()
        else:
            again = "; once more goes on at once"
            is_users = not self.attempt.requeues and stage == signal.SIGINT
            logger.info(f"{name_signal(stage)} to the ranks{again if is_users else ''}")
            step.send(stage)
            return
        self.stop.deadline = time.monotonic() + SRUN_GRACE


def describe_node_step(attempt: Attempt) -> Step:
    """Return the step over the nodes of an attempt."""
    config, run_path, directory = attempt.request.config, attempt.run.path, attempt.request.directory
    box = config.cluster.container
    # As the batch script starts this process: PYTHONPATH may name the working directory, and is for ranks.
    isolation = "-I" if sys.flags.isolated and not box.image else "-P"
    mounts = [f"{run_path}:{run_path}", f"{directory}:{directory}", *box.mounts]
    python = box.python if box.image else sys.executable
    return Step(
        attempt.step_hosts,
        (python, isolation, "-m", "launcher.slurm.task", str(run_path)),
        config.cluster.srun,
        elastic=attempt.is_elastic or bool(attempt.spares),
        directory=directory,
        container=replace(box, mounts=mounts) if box.image else None,
    )


def start_nodes(attempt: Attempt, endpoint: str, coordinator: Coordinator | None = None) -> NodeStep:
    """Start a task on each node, which are to meet at `endpoint`; raises OSError if there is no srun."""
    variables = {LAUNCH_ATTEMPT: str(attempt.run.first_attempt), LAUNCH_RENDEZVOUS: endpoint}
    order = commands.fold_in_order(attempt.step_hosts)
    if len(order) <= LONGEST_ORDER:
        variables[LAUNCH_NODE_ORDER] = order
    step, parent = describe_node_step(attempt), os.getpid()
    reading, writing = make_signal_channel()
    try:
        process = step.start(
            {**attempt.environ, **variables},
            stdin=reading,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: prepare_agent(parent, FORWARDED),
        )
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return NodeStep(process, writing, step.elastic, coordinator)


def skip_step_ids(attempt: Attempt) -> None:
    """Use up as many numbers of steps as give this attempt's step another one than those before it had.

    Numbers begin at 0 in each attempt. slurmctld keeps a signal to a step for a node that does not answer,
    and sends it again a minute later: then the step with that number may be the next attempt's (seen with
    SLURM 22.05; the request that waits names job and step alone).
    """
    step = Step(attempt.hosts[:1], ("true",), {"input": "none", "gres": "none"}, elastic=False)
    null = subprocess.DEVNULL
    for _ in range(attempt.restarts % STEP_ID_CYCLE):
        process = step.start(attempt.environ, stdin=null, stdout=null, stderr=null)
        try:  # if no step can be started, the real one reports it
            process.wait(CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()


STRIDE, TRIAL, RESTART = 7919, 1009, 101
"""Primes, so that neighbouring jobs, the candidates of one job, and its attempts are far from each other."""
TRIALS = 5
"""Candidates that are looked at for a start."""


def pick_port(job_id: int, attempt: int, trial: int, local: tuple[int, int], restart: int = 0) -> int:
    """Return a candidate: outside of the kernel's own ports, another one for every job that may share a node.

    A start after the first one has others. All of SLURM's jobs of some 20,000 in a row have different ones.
    If the kernel leaves no range that is worth the name, ports from LOWEST on are taken all the same.
    """
    ports, trial = list_ports(*local), trial + TRIALS * restart
    return ports[(job_id * STRIDE + attempt * RESTART + trial * TRIAL) % len(ports)]
