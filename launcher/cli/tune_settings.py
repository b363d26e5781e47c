"""What a search of `launch tune` is: its checked settings, what its trials have in common, and its bounds."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.cli.run import specify_job
from launcher.config.compose import read_values
from launcher.config.request import make_request
from launcher.config.run_path import choose_run_path
from launcher.config.settings import Settings
from launcher.errors import UsageError
from launcher.launch.job import JobSpec
from launcher.plan.model import Plan
from launcher.plan.workers_and_threads import bound_by_files, bound_by_memory, bound_by_shm
from launcher.protocol import LAUNCH_LOADER_DEFAULT, LAUNCH_METER, LAUNCH_NUM_WORKERS

if TYPE_CHECKING:
    from launcher.config.compose import Composed

OURS = (LAUNCH_NUM_WORKERS, LAUNCH_LOADER_DEFAULT, LAUNCH_METER)
"""Variables that a trial of a number of workers sets."""
WORKERS_PER_CORE = 2
"""Workers for each core: those that read from a disk or a network wait more than they compute."""
MIN_WORKERS, MAX_WORKERS = 4, 64


def specify_search(
    composed: "Composed", program: tuple[str, ...] | None, variables: Sequence[str] = OURS
) -> JobSpec:
    """Check what is asked, and return what the trials have in common; raises LaunchError.

    `variables` are those that the trials set.
    """
    measure_here(composed)
    run_path = choose_run_path(composed, program, suffix="-tune")
    spec = specify_job(composed, program, run_path, os.environ, "launch tune")
    for name in variables:
        if name in spec.config.env:
            raise UsageError(f"env.{name} is set, which `launch tune` chooses: leave it out")
    return spec


def measure_here(composed: "Composed") -> None:
    """Have the trials run on this machine; raises UsageError for a job that is to run elsewhere."""
    values = read_values(composed, ("nodes", "cluster.kind", "run_dir", "new_run_dir"))
    nodes, kind = str(values["nodes"]), str(values["cluster.kind"])
    for key in ("run_dir", "new_run_dir"):
        if values[key] is not None:
            raise UsageError(
                f"{key}={values[key]}: `launch tune` makes a run directory of its own, leave it out"
            )
    if nodes not in ("auto", "1", "1:1"):
        raise UsageError(f"nodes={nodes}: `launch tune` measures on one node, leave nodes out")
    if kind in ("slurm", "manual"):
        raise UsageError(
            f"cluster={kind}: `launch tune` runs the program here, again and again: run it on a node like"
            " those of the job, inside an allocation (`salloc`, then `srun -N1 -n1 launch tune …`)"
        )
    job = os.environ.get("SLURM_JOB_ID")
    if kind != "local" and job and "SLURMD_NODENAME" not in os.environ:
        raise UsageError(
            f"this shell belongs to SLURM job {job}, but is not on its nodes: `srun -N1 -n1 launch tune …`,"
            " or set cluster=local to measure here"
        )
    composed.tree.cluster.kind, composed.tree.nodes = "local", 1


def find_max_workers(config: Settings, plan: Plan) -> tuple[int, str]:
    """Return the most workers of a rank that a search is to try, with why; raises UsageError."""
    asked = config.tune.max_workers
    if asked != "auto":
        if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
            raise UsageError(f"tune.max_workers={asked}: give a number of at least 1, or auto")
        return asked, f"tune.max_workers={asked}"
    cores, ranks = count_share(plan), len(plan.ranks)
    highest = min(MAX_WORKERS, max(MIN_WORKERS, int(WORKERS_PER_CORE * cores)))
    request = make_request(config, {})
    machine, each_mib = plan.machine, config.dataloader.worker_shm_mib
    bounds = (
        *bound_by_memory(request, machine, ranks),
        *bound_by_shm(machine, highest * ranks, ranks, each_mib),
        *bound_by_files(machine),
    )
    tight = min(bounds, key=lambda bound: bound.max_workers, default=None)
    if tight is not None and tight.max_workers < highest:
        return max(1, tight.max_workers), tight.what
    return highest, f"{WORKERS_PER_CORE} for each of a rank's cores, and at least {MIN_WORKERS}"


def count_share(plan: Plan) -> float:
    """Return the cores of the rank that has fewest, shared ones and a quota on CPU time counted in part."""
    core_of = {cpu.id: cpu.core for cpu in plan.machine.cpus}
    sets = [{core_of[cpu] for cpu in rank.worker_cpus if cpu in core_of} for rank in plan.ranks]
    even = len(set().union(*sets)) / len(sets)
    quota = plan.machine.limits.cpus
    return min(even, *map(len, sets), *([] if quota is None else [quota / len(sets)]))
