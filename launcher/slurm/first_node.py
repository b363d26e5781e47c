"""One attempt of a SLURM job, on its first node or in its user's shell: runs the step and reports its end."""

import errno
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from launcher.config.start import parse_endpoint
from launcher.errors import EXIT_MACHINE, EXIT_SCHEDULER, LaunchError, MachineError, SchedulerError
from launcher.files import open_below
from launcher.launch.coordinator import Coordinator
from launcher.launch.job import choose_restarts, is_port_free, read_client_ports
from launcher.launch.processes import adopt_orphans, end_leftovers
from launcher.launch.signals import KILL_GRACE, catch_signals, name_signal
from launcher.runs.node_records import node_path, read_nodes, refuse_node
from launcher.runs.provenance import describe_sources
from launcher.runs.run_directory import RunDir, explain_write_error, open_run_dir
from launcher.slurm.attempt import Attempt, is_taken_over, start_attempt
from launcher.slurm.attempt_end import StepReport
from launcher.slurm.attempt_lifecycle import end_attempt
from launcher.slurm.commands import MissingCommandError, ask_job
from launcher.slurm.first_node_guard import start_guards
from launcher.slurm.job_request import JobRequest, read_job_request
from launcher.slurm.node_channel import NodeReport
from launcher.slurm.node_order import NodeOrder, find_node_order
from launcher.slurm.node_step import skip_step_ids, start_nodes
from launcher.slurm.notation import fold_in_order, parse_signal
from launcher.slurm.slurm_environ import (
    PORT_TAKEN,
    TRIALS,
    count_gpus,
    list_job_hosts,
    pick_port,
    pick_restart_port,
)
from launcher.slurm.srun import NOT_STARTED, TEMPORARY, has_begun, join_lines
from launcher.slurm.step_monitor import StepMonitor

logger = logging.getLogger(__name__)

RETRY = 5.0
"""Seconds until the next try, if slurmctld is away or the nodes are not ready for another step."""
REFUSALS = 5
"""Tries of which slurmctld itself says that the nodes are not ready."""
RECORD_TIMEOUT = 5.0
"""Seconds for a record to come into sight of this node, on a filesystem that tells late of new files."""


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


def choose_nodes(environ: Mapping[str, str], max_nodes: int) -> tuple[str, ...]:
    """Return the nodes to run on: the first of the job's; raises MachineError."""
    hosts = list_job_hosts(environ)
    if not hosts:
        text = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
        raise MachineError(f"SLURM_JOB_NODELIST={text!r} is no list of nodes: is this a SLURM job?")
    return hosts[:max_nodes]


def order_job_nodes(environ: Mapping[str, str], request: JobRequest) -> NodeOrder:
    """Return the nodes to run on and the spare ones, in the order of their ranks; raises MachineError."""
    cluster = request.config.cluster
    hosts = choose_nodes(environ, request.max_nodes + cluster.spares)
    return find_node_order(cluster.node_order, hosts, environ, request.directory)


def report_node_order(order: NodeOrder) -> None:
    """Say in which order the nodes have their ranks if that is not SLURM's own, and what is wrong with it."""
    for warning in order.warnings:
        logger.warning(f"node order: {warning}")
    if order.source != "slurm":
        logger.info(f"ranks are in the order of {order.why}: {fold_in_order(order.hosts)}")


def run_attempt(request: JobRequest, run: RunDir, environ: Mapping[str, str], *, requeues: bool) -> int:
    """Run one attempt to its end and return the exit code; raises LaunchError before it starts."""
    order = order_job_nodes(environ, request)
    adopt_orphans()
    with catch_signals((parse_signal(request.config.cluster.signal)[0],)) as inbox:
        attempt = start_attempt(request, run, environ, order, requeues=requeues)
        report_node_order(order)
        monitor = StepMonitor(attempt, inbox)
        with start_guards(attempt) as guards:
            try:
                os.close(open_below(run.path, "logs", str(run.first_attempt)))
                if guards and attempt.restarts:
                    guards.await_start()
                skip_step_ids(attempt)
                report = check_before_step(attempt, monitor) or run_step_attempts(attempt, monitor)
            except OSError as error:
                status, reason = EXIT_MACHINE, f"the step could not be started ({error})"
                if error.filename == "srun":
                    fix = ": load SLURM's module, as cluster.setup can" if error.errno == errno.ENOENT else ""
                    status, reason = EXIT_SCHEDULER, f"srun cannot be run ({error.strerror}){fix}"
                elif error.errno in (errno.ENOSPC, errno.EDQUOT):
                    reason = explain_write_error(run, error)
                report = refuse_step(monitor, reason, status)
            except LaunchError as error:
                report = refuse_step(monitor, str(error), error.exit_code)
            finally:
                end_leftovers(KILL_GRACE, (guards.process.pid,) if guards else ())
            return end_attempt(attempt, report)


def check_before_step(attempt: Attempt, monitor: StepMonitor) -> StepReport | None:
    """Check the nodes if that is wanted; returns the attempt's end if the ranks are not to start.

    `preflight.kind=auto` is light for a job with GPUs. A mistake of the checks' own ends no job.
    """
    kind = attempt.request.config.preflight.kind
    if kind == "auto":
        kind = "light" if count_gpus(attempt.environ) else "off"
    if kind == "off":
        return None
    from launcher.slurm.preflight import run_preflight  # most jobs on CPUs have no use for it

    try:
        return run_preflight(attempt, monitor, kind)
    except Exception as error:
        logger.warning(f"preflight failed ({type(error).__name__}: {error}): report it")
        return None


def run_step_attempts(attempt: Attempt, monitor: StepMonitor) -> StepReport:
    """Run the step: again while slurmctld is away, and with another port if the first node's is taken."""
    run, first, local = attempt.run, attempt.hosts[0], read_client_ports()
    salt = 0 if attempt.requeues else zlib.crc32(os.fsencode(run.path))
    job = int(attempt.environ.get("SLURM_JOB_ID", "0")) + salt
    trial, refused = 0, 0
    while True:
        if monitor.take_early_signals():
            return report_stop(monitor)
        if is_taken_over(run):
            return refuse_step(monitor, "another node has ended this attempt", EXIT_MACHINE)
        for record in read_nodes(run.path, run.first_attempt):  # of a port that was taken
            node_path(run.path, run.first_attempt, record.host).unlink(missing_ok=True)
        port = pick_port(job, run.first_attempt, trial, local)
        # This may be a login node with `salloc`, rather than the node that serves the rendezvous.
        is_first = first == attempt.environ.get("SLURMD_NODENAME")
        if trial + 1 < TRIALS and is_first and not is_port_free(port):
            trial += 1
            continue
        find_port = partial(pick_restart_port, job, run.first_attempt, trial, local)
        report = run_node_step(attempt, monitor, f"{first}:{port}", find_port)
        if monitor.signals:
            return report
        said = "".join(record.agent_said for record in report.records)
        refusal = said if said.startswith(NOT_STARTED) else ""
        is_away = bool(refusal) and is_controller_away(attempt)
        refused += bool(refusal) and not is_away
        if is_away or (TEMPORARY.search(refusal) and refused < REFUSALS):
            logger.warning(f"{refusal}: {'until slurmctld answers, ' if is_away else ''}it is tried again")
            monitor.wait(RETRY)
            continue
        taken = any(record.exit_code == PORT_TAKEN and not record.failure for record in report.records)
        if not taken or trial + 1 >= TRIALS:
            return report
        trial += 1
        logger.info(f"port {port} of {first} was taken: the step starts again, with another one")


def is_controller_away(attempt: Attempt) -> bool:
    """Tell whether slurmctld answers nobody: what srun says then can have any words."""
    try:
        ask_job(attempt.job_id, attempt.environ)
    except SchedulerError as error:
        return not isinstance(error, MissingCommandError)
    return False


def run_node_step(
    attempt: Attempt, monitor: StepMonitor, endpoint: str, find_port: Callable[[int], int]
) -> StepReport:
    """Run the step of a task of ours on each node, which starts its ranks and writes the node's record.

    `endpoint` is where the ranks of the first start meet, HOST:PORT, and `find_port` gives the port of each
    start by its number, if they are not torchrun's. A node that replaces the first one is called as SLURM
    calls it.
    """
    config, first, run = attempt.request.config, attempt.hosts[0], attempt.run
    address, port = parse_endpoint(config.rdzv_endpoint or endpoint)

    def find_endpoint(host: str, restart: int) -> tuple[str, int]:
        return (address if host == first else host), (find_port(restart) if restart else port)

    coordinator = None
    if attempt.request.agent == "direct":
        restarts = choose_restarts(config, attempt.environ) or 0
        coordinator = Coordinator(attempt.step_hosts, len(attempt.hosts), restarts, find_endpoint)
    step = start_nodes(attempt, endpoint, coordinator)
    local_size = str(config.nproc_per_node)
    if step.group and not attempt.spares and re.fullmatch("0*[1-9][0-9]{0,4}", local_size):
        for host in attempt.hosts:  # the first start is ordered before any task is ready
            step.group.take_report(NodeReport("ready", host, number=int(local_size)))
    asking = None
    if "git" not in attempt.manifest:  # else the submission has told of the sources
        asking = threading.Thread(target=add_provenance, args=(attempt,), daemon=True)
        asking.start()
    if step.group and attempt.spares:
        from launcher.slurm.spares import NodeReplacement  # most jobs have no use for it

        replacement = NodeReplacement(attempt, step, step.group)
        try:
            monitor.run_to_end(step, replacement.attend)
        finally:
            replacement.close()
    else:
        monitor.run_to_end(step)
    if asking:
        asking.join()
    step.close()
    code, lines, deadline = step.process.returncode, (*step.srun_lines,), time.monotonic() + RECORD_TIMEOUT
    while True:  # records may come late if srun knows of no failure
        records = [one for one in read_nodes(run.path, run.first_attempt) if one.host in attempt.hosts]
        if len(records) >= len(attempt.hosts) or code or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    # If no task ever ran, no node was lost: SLURM refused the step.
    if not records and not monitor.signals and code < 0:
        reason = f"srun was ended by {name_signal(-code)}, and its step"
        return refuse_step(monitor, reason, 128 - code)
    if not records and not monitor.signals and code and not has_begun(lines):
        words = join_lines(lines) or "it printed nothing"
        return refuse_step(monitor, f"{NOT_STARTED} (code {code}): {words}", EXIT_SCHEDULER)
    reporting = {record.host for record in records}
    return StepReport(
        code,
        tuple(records),
        tuple(host for host in attempt.hosts if host not in reporting),
        tuple(monitor.signals),
        monitor.stop_at is not None,
        lines,
        tuple(step.signalled),
        step.cancelled,
    )


def add_provenance(attempt: Attempt) -> None:
    """Complete the manifest with git commit and package versions: a thread's body."""
    attempt.manifest.update(describe_sources(Path(attempt.request.directory)))


def refuse_step(monitor: StepMonitor, reason: str, status: int) -> StepReport:
    """Return the report of a step that there is none of, with a record of ours that says why."""
    record = refuse_node(monitor.attempt.hosts[0], 0, status, reason, time.time())
    return StepReport(status, (record,), signals=tuple(monitor.signals))


def report_stop(monitor: StepMonitor) -> StepReport:
    """Return the report of an attempt that a signal ended before its ranks were started."""
    report = StepReport(1, signals=tuple(monitor.signals))
    return StepReport(128 + report.stops[0], signals=report.signals)
