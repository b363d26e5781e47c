"""What a submission script says of its job to people who read it."""

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.config.program import find_program
from launcher.launch.job import Draft
from launcher.runs.run_directory import RunDir
from launcher.runs.secrets import mask_variables, mask_words
from launcher.slurm.attempt import Attempt
from launcher.slurm.job_request import make_request
from launcher.slurm.node_step import describe_step
from launcher.slurm.srun_agent import render_ranks
from launcher.slurm.srun_command import render_step

HOSTS, RUN_DIR = "NODES", Path("RUN_DIR")
"""Stand for what is known once the job runs."""


def describe_jobs(drafts: Sequence[Draft], argv: Sequence[str]) -> tuple[str, ...]:
    """Return the lines for a job, or for the members of an array; secrets are masked."""
    lines = [f"Made by: {shlex.join(mask_words(['launch', *argv]))}"]
    for number, draft in enumerate(drafts):
        lines += [f"Member {number} of the array:"] if len(drafts) > 1 else []
        lines += describe_job(draft)
    return tuple(lines)


def describe_job(draft: Draft) -> Iterator[str]:
    """Give what one job runs, by which command on its nodes, and with which variables."""
    words = find_program(draft.words, draft.config, draft.environ)
    agent = "srun, a task for each rank" if draft.config.agent == "srun" else "torchrun on each node"
    yield f"Program: {shlex.join(mask_words(words))} (ranks are started by {agent}, in {Path.cwd()})"
    yield f"Step: {shlex.join(mask_words(render_any(draft)))}"
    variables = (f"{name}={shlex.quote(value)}" for name, value in mask_variables(draft.config.env).items())
    yield f"Variables: those of the shell that submits, and {' '.join(variables) or 'no others'}"


def render_any(draft: Draft) -> tuple[str, ...]:
    """Return srun's command, as the job's first node runs it, with what is known before."""
    request = make_request(draft, (), RUN_DIR)
    hosts = (HOSTS,) * draft.cluster.max_nodes
    step = describe_step(Attempt(request, RunDir(RUN_DIR), os.environ, hosts, {}, requeues=True))
    words = render_ranks(step, 1) if draft.config.agent == "srun" else render_step(step)
    left_out = ("--nodelist=", "--ntasks") if draft.config.agent == "srun" else ("--nodelist=",)
    return tuple(word for word in words if not word.startswith(left_out))
