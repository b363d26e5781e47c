"""Starts the step of `agent=srun`: what its ranks are told, and the process of srun."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.config.program import SHIM, find_program
from launcher.config.request import describe_wishes
from launcher.errors import MachineError
from launcher.launch.processes import prepare_agent
from launcher.launch.signals import FORWARDED
from launcher.launch.torchrun import check_port_free, parse_endpoint
from launcher.protocol import (
    LAUNCH_ATTEMPT,
    LAUNCH_RDZV_ID,
    LAUNCH_RECORD_DIR,
    LAUNCH_ROLE,
    LAUNCH_SIGNAL,
    LAUNCH_STRICT,
)
from launcher.runs.run_directory import RunDir, name_run_dir
from launcher.runs.secrets import mask_variables
from launcher.slurm.job_request import JobRequest
from launcher.slurm.notation import parse_signal
from launcher.slurm.rank_output import RankView
from launcher.slurm.rank_step import RankStep
from launcher.slurm.srun_agent import build_environ, count_ranks, render_ranks
from launcher.slurm.srun_command import Step


@dataclass(frozen=True, slots=True)
class RankJob:
    """One attempt of a job whose ranks srun starts."""

    request: JobRequest
    run: RunDir
    hosts: tuple[str, ...]
    """The nodes of the step, by SLURM_NODEID."""
    environ: Mapping[str, str]
    """The head's."""

    @property
    def ranks(self) -> int:
        """Ranks on each node; raises UsageError where neither the configuration nor SLURM tells."""
        return count_ranks(self.request.config.nproc_per_node, self.environ)


def is_taken_here(job: RankJob, endpoint: str) -> bool:
    """Tell whether this is the node to serve the ranks, and its port is not free.

    From elsewhere, as with `salloc` on a login node, rank 0 has to find it, when the others have begun.
    """
    names = (job.environ.get("SLURMD_NODENAME"), os.uname().nodename.partition(".")[0])
    if job.hosts[0] not in names or job.request.config.torchrun.master_addr:
        return False
    try:
        check_port_free(job.request.config.torchrun.master_port or parse_endpoint(endpoint)[1])
    except MachineError:
        return True
    return False


def start_ranks(job: RankJob, step: Step, endpoint: str) -> RankStep:
    """Start the ranks on the step's nodes; `endpoint` (HOST:PORT) is where rank 0 is to serve the others.

    The step's command is replaced. Raises UsageError for what cannot run, OSError where there is no srun.
    """
    config = job.request.config
    own = {**job.environ, **config.env}
    told = tell_ranks(job, endpoint)
    shown = {"configured": mask_variables(config.env)}
    wishes = {"root": config.machine.root, **shown, **describe_wishes(config)}
    step = replace(step, command=render_command(job.request, own))
    process = open_srun(render_ranks(step, job.ranks), build_environ(own, told, wishes))
    view = RankView(job.run, job.hosts, job.ranks, config.logs.console)
    codes = config.cluster.requeue.exit_codes
    return RankStep(process, view, step, told[LAUNCH_RDZV_ID], job.environ, codes)


def render_command(request: JobRequest, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the shim and the program; a container has its own Python, and the launcher with it."""
    box = request.config.cluster.container
    shim = (sys.executable, "-I", "-S", str(SHIM))
    if box.image:
        shim = (box.python, "-P", "-m", "launcher.rank")
        environ = {"PYTHON_EXEC": box.python, **environ}
    return (*shim, *find_program(request.words, request.config, environ))


def tell_ranks(job: RankJob, endpoint: str) -> dict[str, str]:
    """Return what the shim is told, and where the ranks meet."""
    config, own, run = job.request.config, job.request.config.torchrun, job.run
    host, port = parse_endpoint(endpoint)
    unique = f"{run.id}-{job.environ.get('SLURM_JOB_ID')}-{run.first_attempt}-{os.getpid()}-{port}"
    return {
        LAUNCH_RECORD_DIR: str(run.path),
        **name_run_dir(run),
        LAUNCH_ATTEMPT: str(run.first_attempt),
        LAUNCH_RDZV_ID: own.rdzv_id or unique,
        LAUNCH_SIGNAL: str(int(parse_signal(config.cluster.signal)[0])),
        **({LAUNCH_ROLE: own.role} if own.role else {}),
        **({LAUNCH_STRICT: "1"} if config.binding.strict else {}),
        "MASTER_ADDR": own.master_addr or host,
        "MASTER_PORT": str(own.master_port or port),
    }


def open_srun(words: Sequence[str], environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start srun in a session of its own, so that a terminal's Ctrl-C reaches the head alone."""
    parent = os.getpid()
    return subprocess.Popen(
        words,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: prepare_agent(parent, FORWARDED),  # noqa: PLW1509 - no other thread forks here
    )
