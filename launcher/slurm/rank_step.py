"""The step of `agent=srun`, whose tasks are the ranks: there is no process of ours on the nodes."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from launcher.config.cluster import parse_endpoint
from launcher.config.program import find_program
from launcher.config.request import make_request
from launcher.errors import SchedulerError
from launcher.launch.job import SHIM
from launcher.launch.processes import prepare_agent
from launcher.launch.signals import FORWARDED, STOPPING, name_signal
from launcher.plan.json_form import request_to_json
from launcher.protocol import (
    LAUNCH_ATTEMPT,
    LAUNCH_RDZV_ID,
    LAUNCH_RECORD_DIR,
    LAUNCH_ROLE,
    LAUNCH_SIGNAL,
    LAUNCH_STRICT,
)
from launcher.report.output_viewer import OutputViewer, ViewOptions
from launcher.runs.rank_logs import Follower
from launcher.runs.run_directory import RunDir, name_run_dir, write_private
from launcher.slurm.client import run_slurm
from launcher.slurm.job_request import JobRequest
from launcher.slurm.notation import expand_hosts, parse_signal
from launcher.slurm.rendezvous import is_port_free
from launcher.slurm.slurm_environ import clean_for_step
from launcher.slurm.srun_command import Step, build_srun_environ, count_ranks, render_ranks, render_step
from launcher.slurm.srun_messages import (
    SrunReport,
    TaskEnd,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RankStep:
    """A running step whose tasks are the ranks."""

    process: "subprocess.Popen[bytes]"
    viewer: OutputViewer
    job: "RankJob"
    spec: Step
    """What srun was started with."""
    run_id: str
    """TORCHELASTIC_RUN_ID, which no other step of the job has."""
    environ: Mapping[str, str]
    """The batch script's."""
    exit_codes: Collection[int] = ()
    """Those by which a rank asks for another start."""
    started: float = field(default_factory=time.time)
    srun_report: SrunReport = field(default_factory=SrunReport)
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Begin to read what srun prints, and to show what the ranks print."""
        self.reader = threading.Thread(target=self.read_errors, daemon=True)
        self.reader.start()
        self.viewer.start()

    def read_errors(self) -> None:
        """Read srun's stderr to its end: the thread's body."""
        for raw in self.process.stderr or ():
            line, is_first = raw.decode(errors="replace").rstrip("\n"), not self.srun_report.ends
            if self.srun_report.note_line(line):
                self.viewer.show_text(line)
            if (
                is_first
                and self.srun_report.ends
                and not (self.srun_report.stop or self.srun_report.cancelled)
            ):
                logger.info(self.describe_first_end(self.srun_report.ends[0][1]))

    def describe_first_end(self, end: TaskEnd) -> str:
        """Say at once that ranks have failed, since the others may take long to end."""
        how = f"code {end.exitcode}" if end.exitcode > 0 else name_signal(-end.exitcode)
        hosts = ", ".join(dict.fromkeys(self.job.name_host(rank) for rank in end.tasks))
        ranks = "rank" if len(end.tasks) == 1 else "ranks"
        numbers = ", ".join(map(str, end.tasks[:8])) + (" …" if len(end.tasks) > 8 else "")
        what = "failed"
        if end.exitcode in self.exit_codes:
            what = "asks for another start" if len(end.tasks) == 1 else "ask for another start"
        return f"{ranks} {numbers} on {hosts} {what} ({how}); srun ends the others"

    @property
    def lost(self) -> Set[str]:
        """Nodes that SLURM has given up."""
        return self.srun_report.lost

    def send(self, number: int) -> None:
        """Send a signal to the ranks: one that stops to all of them, another to those that catch it.

        That takes another step, and so a thread. SIGKILL is left to srun, which gets SIGTERM.
        """
        if number in STOPPING and self.srun_report.stop is None:
            self.srun_report.stop = (number, time.time())
        if number == signal.SIGKILL:
            self.process.send_signal(signal.SIGTERM)
        else:
            threading.Thread(target=self.run_signal_step, args=(number,), daemon=True).start()

    def run_signal_step(self, number: int) -> None:
        """Send each node's ranks a signal; if that fails, srun sends a user signal to all of them."""
        try:
            lines = run_slurm(self.render_signal_step(number), clean_for_step(self.environ))
            spared = sum(map(int, lines.split()))
        except (SchedulerError, ValueError) as error:
            if self.process.poll() is None:
                logger.warning(f"{name_signal(number)} not sent to the ranks alone ({error})")
                if number not in STOPPING:
                    self.process.send_signal(number)
            return
        if spared:
            ranks = "1 rank has" if spared == 1 else f"{spared} ranks have"
            logger.info(f"{name_signal(number)} not sent: {ranks} no handler for it")

    def render_signal_step(self, number: int) -> tuple[str, ...]:
        """Return the argv of the step that sends a signal: a task on each node, outside of any container."""
        job = self.environ.get("SLURM_JOB_ID", "")
        command = (
            sys.executable,
            "-P",
            "-m",
            "launcher.slurm.rank_signal",
            str(int(number)),
            job,
            self.run_id,
        )
        step = Step(
            self.spec.nodes,
            self.spec.nodelist,
            elastic=True,
            directory=self.spec.directory,
            command=command,
            options={"input": "none", "gres": "none"},
        )
        return render_step(step)

    def close(self) -> None:
        """Read and show the rest, after srun's end."""
        self.reader.join()
        self.viewer.finish()
        self.viewer.close()


@dataclass(frozen=True, slots=True)
class RankJob:
    """One attempt of a job whose ranks srun starts."""

    request: JobRequest
    run: RunDir
    hosts: tuple[str, ...]
    """The nodes of the step, in the order of their ranks."""
    environ: Mapping[str, str]
    """The batch script's."""

    @property
    def ranks(self) -> int:
        """Ranks on each node; raises UsageError if neither the configuration nor SLURM gives a number."""
        return count_ranks(self.request.config.nproc_per_node, self.environ)

    def name_host(self, rank: int) -> str:
        """Return the node that a rank is on."""
        node = rank // self.ranks
        return self.hosts[node] if node < len(self.hosts) else "?"


def make_step_viewer(job: RankJob) -> OutputViewer:
    """Return a viewer for the output of the ranks of all nodes: no process of ours on the nodes shows it."""
    mode, count = job.request.config.logs.console, len(job.hosts) * job.ranks
    origin = job.name_host if count > 1 else None
    options = ViewOptions(mode, origin, ends_line=True)
    viewer = OutputViewer(job.run, Follower(), options)
    for rank in range(count if mode == "all" else 1):
        viewer.watch_rank(rank, job.run.first_attempt)
    return viewer


def is_taken_here(job: RankJob, endpoint: str) -> bool:
    """Tell whether this is the node to serve the ranks, and its port is not free.

    From another machine, as with `salloc` on a login node, rank 0 alone can find that out.
    """
    names = (job.environ.get("SLURMD_NODENAME"), os.uname().nodename.partition(".")[0])
    if job.hosts[0] not in names or job.request.config.torchrun.master_addr:
        return False
    return not is_port_free(job.request.config.torchrun.master_port or parse_endpoint(endpoint)[1])


def start_ranks(job: RankJob, step: Step, endpoint: str) -> RankStep:
    """Start the ranks on the step's nodes; `endpoint` (HOST:PORT) is where rank 0 is to serve the others.

    The step's command is replaced. Raises UsageError for what cannot run, OSError if there is no srun.
    """
    config = job.request.config
    environ = {**job.environ, **config.env}
    variables = build_rank_variables(job, endpoint)
    node_request = request_to_json(make_request(config, environ), config.machine.root)
    step = replace(step, command=render_rank_command(job.request, environ))
    argv = render_ranks(step, job.ranks, write_host_file(job))
    process = open_srun(argv, build_srun_environ(environ, variables, node_request))
    viewer = make_step_viewer(job)
    codes = config.cluster.requeue.exit_codes
    return RankStep(process, viewer, job, step, variables[LAUNCH_RDZV_ID], job.environ, codes)


def write_host_file(job: RankJob) -> str:
    """Write the node of each rank into a file for srun, and return its path; empty for SLURM's own order.

    If it cannot be written, raises OSError, as what is written next into the run directory would.
    """
    text = job.environ.get("SLURM_JOB_NODELIST") or job.environ.get("SLURM_NODELIST", "")
    if tuple(host for host in expand_hosts(text) if host in job.hosts) == job.hosts:
        return ""
    path = job.run.path / f"hostfile-{job.run.first_attempt}"
    write_private(path, "".join(f"{host}\n" * job.ranks for host in job.hosts))
    return str(path)


def render_rank_command(request: JobRequest, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the shim and the program; a container has its own Python, and the launcher with it."""
    box = request.config.cluster.container
    shim = (sys.executable, "-I", "-S", str(SHIM))
    if box.image:
        shim = (box.python, "-P", "-m", "launcher.rank")
        environ = {"PYTHON_EXEC": box.python, **environ}
    return (*shim, *find_program(request.words, request.config, environ))


def build_rank_variables(job: RankJob, endpoint: str) -> dict[str, str]:
    """Return the variables for the shim, and the rendezvous' address."""
    config, torchrun, run = job.request.config, job.request.config.torchrun, job.run
    host, port = parse_endpoint(endpoint)
    unique = f"{run.id}-{job.environ.get('SLURM_JOB_ID')}-{run.first_attempt}-{os.getpid()}-{port}"
    return {
        LAUNCH_RECORD_DIR: str(run.path),
        **name_run_dir(run),
        LAUNCH_ATTEMPT: str(run.first_attempt),
        LAUNCH_RDZV_ID: torchrun.rdzv_id or unique,
        LAUNCH_SIGNAL: str(int(parse_signal(config.cluster.signal)[0])),
        **({LAUNCH_ROLE: torchrun.role} if torchrun.role else {}),
        **({LAUNCH_STRICT: "1"} if config.binding.strict else {}),
        "MASTER_ADDR": torchrun.master_addr or host,
        "MASTER_PORT": str(torchrun.master_port or port),
    }


def open_srun(argv: Sequence[str], environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start srun in a session of its own, so that a terminal's Ctrl-C reaches this process alone."""
    parent = os.getpid()
    return subprocess.Popen(
        argv,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: prepare_agent(parent, FORWARDED),  # noqa: PLW1509 - no other thread forks here
    )
