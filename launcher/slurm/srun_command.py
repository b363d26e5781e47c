"""srun's command line for a step over the nodes of a job."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CPU_COUNTS = re.compile(r"(?:^|,)(\d+)")
"""The CPUs of nodes in SLURM_JOB_CPUS_PER_NODE, `16(x3),8`."""


@dataclass(frozen=True, slots=True)
class Container:
    """The container that a node's part of the job runs in."""

    runtime: str
    """`pyxis` or `apptainer`."""
    image: str
    mounts: tuple[str, ...]
    """`SRC:DST[:OPTIONS]`; the run directory and the working directory are among them."""
    args: tuple[str, ...]
    """Further arguments of the runtime."""


@dataclass(frozen=True, slots=True)
class Step:
    """What srun is to start: one task on each node."""

    nodes: int
    nodelist: tuple[str, ...]
    """These nodes of the job; empty is all of them."""
    elastic: bool
    """The step outlives the loss of a node, and of a task."""
    directory: str
    """Working directory of the tasks."""
    command: tuple[str, ...]
    options: Mapping[str, object]
    """The user's own (`cluster.srun`), which win."""
    container: Container | None = None


def render_step(step: Step) -> tuple[str, ...]:
    """Return srun's command line.

    `--overlap --whole --mem=0` give each task all that the job has on its node, beside the batch script and
    whatever the user still runs there; `--cpu-bind=none` leaves the placement to the ranks, and `--quiet`
    spares the logs what srun tells of itself short of errors. A task that fails ends the others, by SIGTERM
    and, KillWait later, SIGKILL. There is no limit on the time between the first end and the last (`--wait`):
    a rank that still writes a checkpoint is not to be killed for the others' haste, and torchrun's agents
    wait for each other by themselves.
    """
    size = {
        "nodes": step.nodes,
        "ntasks": step.nodes,
        "ntasks-per-node": 1,
        "nodelist": ",".join(step.nodelist) or None,
        "whole": True,
        "overlap": True,
        "mem": 0,
        "cpu-bind": "none",
        "mpi": "none",
        "export": "ALL",
        "input": "all",
        "chdir": step.directory,
        "quiet": True,
        "kill-on-bad-exit": 0 if step.elastic else 1,
        "wait": 0,
        "no-kill": step.elastic,
    }
    user_options = {name.replace("_", "-"): value for name, value in step.options.items()}
    pyxis, arguments, command = render_container(step)
    return ("srun", *render_srun_options({**size, **pyxis, **user_options}), *arguments, *command)


def give_cpus(options: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, object]:
    """Return the user's options of a step with one task on each node, which has all of the job's CPUs there.

    If they have srun bind (`cpu_bind=cores`), it binds a task of which nobody says how many CPUs it has to
    a single core, and all of the node's ranks with it. Of nodes with different numbers the smallest counts.
    """
    option_names = {name.replace("_", "-"): value for name, value in options.items()}
    counts = [int(count) for count in CPU_COUNTS.findall(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    binds = option_names.get("cpu-bind") and "none" not in str(option_names["cpu-bind"])
    if not binds or "cpus-per-task" in option_names or not counts:
        return {**options}
    return {"cpus-per-task": min(counts), **options}


def render_srun_options(options: Mapping[str, object]) -> list[str]:
    """Write options as SLURM's commands read them: true is `--name`; null and false are left out."""
    argv: list[str] = []
    for name, value in options.items():
        if value is True:
            argv.append(f"--{name}")
        elif value is not None and value is not False:
            argv.append(f"--{name}={value}")
    return argv


def render_container(step: Step) -> tuple[dict[str, object], Sequence[str], Sequence[str]]:
    """Return srun's options, further words for it, and the command, which put tasks into their container."""
    box = step.container
    if box is None:
        return {}, (), step.command
    if box.runtime == "pyxis":
        options: dict[str, object] = {
            "container-image": box.image,
            "container-mounts": ",".join(box.mounts) or None,
            "container-workdir": step.directory,
        }
        return options, box.args, step.command
    binds = [word for mount in box.mounts for word in ("--bind", mount)]
    argv = ("apptainer", "exec", "--nv", *binds, "--pwd", step.directory, *box.args, box.image)
    return {}, (), (*argv, *step.command)
