"""One attempt of a SLURM job, on its first node or in its user's shell: runs the step and reports its end."""

import contextlib
import errno
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from launcher.config.start import parse_endpoint
from launcher.errors import EXIT_MACHINE, EXIT_SCHEDULER, LaunchError, MachineError, SchedulerError
from launcher.files import open_below
from launcher.launch.coordinator import Coordinator
from launcher.launch.endpoint import is_port_free, read_client_ports
from launcher.launch.job import choose_restarts
from launcher.launch.processes import adopt_orphans, end_leftovers
from launcher.launch.signals import KILL_GRACE, catch_signals, name_signal
from launcher.runs.node_records import node_path, read_nodes, refuse_node
from launcher.runs.provenance import describe_sources
from launcher.runs.run_directory import RunDir, explain_write_error, open_run_dir
from launcher.slurm.attempt import Attempt, is_taken_over, try_write_manifest
from launcher.slurm.attempt_end import StepReport
from launcher.slurm.attempt_lifecycle import end_attempt, start_attempt
from launcher.slurm.commands import MissingCommandError, ask_job
from launcher.slurm.diagnosis import find_task_ends
from launcher.slurm.first_node_guard import start_guards
from launcher.slurm.job_request import JobRequest, read_job_request
from launcher.slurm.node_order import NodeOrder, find_node_order
from launcher.slurm.node_step import (
    collect_node_records,
    remove_caches,
    skip_step_ids,
    start_nodes,
)
from launcher.slurm.notation import fold_in_order, parse_signal
from launcher.slurm.slurm_environ import PORT_TAKEN, TRIALS, list_job_hosts, pick_port, pick_restart_port
from launcher.slurm.srun import drop_prefix, has_begun, is_temporary
from launcher.slurm.step_monitor import StepMonitor

logger = logging.getLogger(__name__)

NOT_STARTED = "srun did not start the step"
"""How the record of a step begins that SLURM has refused."""
RETRY = 5.0
"""Seconds until the next try, if slurmctld is away or the nodes are not ready for another step."""
REFUSALS = 5
"""Tries of which slurmctld itself says that the nodes are not ready."""


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
    hosts, spares = order.hosts[: request.max_nodes], order.hosts[request.max_nodes :]
    number, _ = parse_signal(request.config.cluster.signal)
    adopt_orphans()
    with catch_signals((number,)) as inbox:
        attempt = start_attempt(request, run, environ, hosts, requeues=requeues, order=order)
        if spares:
            attempt.spares, attempt.manifest["spares"] = spares, list(spares)
            try_write_manifest(run, attempt.manifest)
        report_node_order(order)
        salt = 0 if requeues else zlib.crc32(os.fsencode(run.path))
        monitor = StepMonitor(attempt, inbox)
        with start_guards(attempt) as guards:
            try:
                os.close(open_below(run.path, "logs", str(run.first_attempt)))
                if guards and attempt.restarts:
                    guards.await_start()
                skip_step_ids(attempt)
                report = check_before_step(attempt, monitor) or run_step_attempts(attempt, monitor, salt)
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

    A mistake of the checks' own ends no job.
    """
    kind = choose_preflight_kind(attempt.request.config.preflight.kind, attempt.environ)
    if not kind:
        return None
    # Most jobs on CPUs have no use for it.
    from launcher.slurm.preflight import report_early_stop, run_preflight

    try:
        return run_preflight(attempt, monitor, kind)
    except Exception as error:
        logger.warning(f"preflight failed ({type(error).__name__}: {error}): report it")
        return report_early_stop(monitor)


def run_step_attempts(attempt: Attempt, monitor: StepMonitor, salt: int) -> StepReport:
    """Run the step: again while slurmctld is away, and with another port if the first node's is taken."""
    job, local = int(attempt.environ.get("SLURM_JOB_ID", "0")), read_client_ports()
    trial, refused = 0, 0
    while True:
        if is_taken_over(attempt.run):
            return refuse_step(monitor, "another node has ended this attempt", EXIT_MACHINE)
        for record in read_nodes(attempt.run.path, attempt.run.first_attempt):  # of a port that was taken
            node_path(attempt.run.path, attempt.run.first_attempt, record.host).unlink(missing_ok=True)
        port = pick_port(job + salt, attempt.run.first_attempt, trial, local)
        # This may be a login node with `salloc`, rather than the node that serves the rendezvous.
        is_first = attempt.hosts[0] == attempt.environ.get("SLURMD_NODENAME")
        if trial + 1 < TRIALS and is_first and not is_port_free(port):
            trial += 1
            continue
        endpoint = f"{attempt.hosts[0]}:{port}"
        find_port = partial(pick_restart_port, job + salt, attempt.run.first_attempt, trial, local)
        report = run_node_step(attempt, monitor, endpoint, find_port)
        if monitor.signals:
            return report
        complaint = next((one.agent_said for one in report.records if not one.failure), "")
        complaint = complaint if complaint.startswith(NOT_STARTED) else ""
        is_away = complaint and is_controller_away(attempt)
        if is_away or is_temporary(complaint):
            refused += not is_away
            if refused >= REFUSALS:
                return report
            logger.warning(f"{complaint}: {'until slurmctld answers, ' if is_away else ''}it is tried again")
            monitor.wait(RETRY)
            if not monitor.signals:
                continue
        taken = any(record.exit_code == PORT_TAKEN and not record.failure for record in report.records)
        if monitor.signals or not taken or trial + 1 >= TRIALS:
            return report
        trial += 1
        logger.info(f"port {port} of {attempt.hosts[0]} was taken: the step starts again, with another one")


def is_controller_away(attempt: Attempt) -> bool:
    """Tell whether slurmctld answers nobody: what srun says then can have any words."""
    try:
        ask_job(attempt.job_id, attempt.environ)
    except MissingCommandError:
        return False
    except SchedulerError:
        return True
    return False


def run_node_step(
    attempt: Attempt, monitor: StepMonitor, endpoint: str, find_port: Callable[[int], int]
) -> StepReport:
    """Run the step of a task of ours on each node, which starts its ranks and writes the node's record.

    `endpoint` is where the ranks of the first start meet, HOST:PORT, and `find_port` gives the port of each
    start by its number, if they are not torchrun's. A node that replaces the first one is called as SLURM
    calls it.
    """
    config, first = attempt.request.config, attempt.hosts[0]
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
        step.group.begin(attempt.hosts, int(local_size))
    with add_provenance(attempt):
        if step.group and attempt.spares:
            from launcher.slurm.spares import NodeReplacement  # most jobs have no use for it

            replacement = NodeReplacement(attempt, step, step.group)
            try:
                monitor.run_to_end(step, replacement.attend)
            finally:
                replacement.close()
        else:
            monitor.run_to_end(step)
    step.close()
    records, code, lines = collect_node_records(attempt, step), step.process.returncode, (*step.srun_lines,)
    reporting = {record.host for record in records}
    missing = tuple(host for host in attempt.hosts if host not in reporting)
    # If no task ever ran, no node was lost: SLURM refused the step.
    if not records and not monitor.signals and code < 0:
        report = refuse_step(monitor, f"srun was ended by {name_signal(-code)}, and its step", 128 - code)
        report = replace(report, srun_exitcode=code, srun_lines=lines)
    elif not records and not monitor.signals and code and not has_begun(lines):
        words = "; ".join(map(drop_prefix, lines[-3:])) or "it printed nothing"
        report = refuse_step(monitor, f"{NOT_STARTED} (code {code}): {words}", EXIT_SCHEDULER)
        report = replace(report, srun_exitcode=code, srun_lines=lines)
    else:
        report = monitor.report(code, records, missing, lines)
    if not monitor.signals:
        remove_caches(attempt, list(find_task_ends(report)))
    return replace(report, signalled=tuple(step.signalled), cancelled=step.cancelled)


@contextlib.contextmanager
def add_provenance(attempt: Attempt) -> Iterator[None]:
    """Complete the manifest with git commit and package versions, which a submission has done already."""
    if "git" in attempt.manifest:
        yield
        return
    directory = Path(attempt.request.directory)
    asking = threading.Thread(
        target=lambda: attempt.manifest.update(describe_sources(directory)), daemon=True
    )
    asking.start()
    yield
    asking.join()


def refuse_step(monitor: StepMonitor, reason: str, status: int) -> StepReport:
    """Return the report of a step that there is none of, with a record of ours that says why."""
    record = refuse_node(monitor.attempt.hosts[0], 0, status, reason, time.time())
    return monitor.report(status, [record])


DRIVER_FILES = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/kfd")
"""Signs of a GPU's driver on this node."""
PCI_DEVICES = Path("/sys/bus/pci/devices")
GPU_VENDORS = ("0x10de", "0x1002")
"""NVIDIA and AMD."""
GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""Beginnings of PCI classes: VGA, 3D and other display controllers, processing accelerators."""


def choose_preflight_kind(kind: str, environ: Mapping[str, str]) -> str:
    """Return `light`, `deep`, or empty for none; `auto` is light for a job with GPUs.

    On a node of the job there has to be a GPU, if without its driver: SLURM may count something else.
    """
    if kind != "auto":
        return "" if kind == "off" else kind
    text = environ.get("SLURM_GPUS_ON_NODE") or environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    if text in ("", "0"):
        return ""
    here = "SLURMD_NODENAME" in environ
    return "light" if not here or has_gpu() else ""


def has_gpu() -> bool:
    """Tell whether this node has a GPU's driver, or a GPU whose driver is gone."""
    return any(map(os.path.exists, DRIVER_FILES)) or any(map(is_gpu, PCI_DEVICES.glob("*")))


def is_gpu(device: Path) -> bool:
    """Tell whether a PCI device is a GPU, by its vendor and class."""
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except (OSError, UnicodeDecodeError):
        return False
    return vendor in GPU_VENDORS and kind.startswith(GPU_CLASSES)
