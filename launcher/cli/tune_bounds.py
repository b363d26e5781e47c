"""How many DataLoader workers are worth trying on a node."""

from launcher.config.request import make_request
from launcher.config.schema import LaunchConfig
from launcher.errors import UsageError
from launcher.plan.model import Plan
from launcher.plan.workers_and_threads import bound_by_files, bound_by_memory, bound_by_shm

EACH = 2
"""Workers for each core: those that read from a disk or a network wait more than they compute."""
LEAST, MOST = 4, 64


def find_max_workers(config: LaunchConfig, plan: Plan) -> tuple[int, str]:
    """Return the most workers of a rank that a search is to try, with why; raises UsageError."""
    asked = config.tune.max_workers
    if asked != "auto":
        if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
            raise UsageError(f"tune.max_workers={asked}: give a number of at least 1, or auto")
        return asked, f"tune.max_workers={asked}"
    cores, ranks = count_share(plan), len(plan.ranks)
    most = min(MOST, max(LEAST, int(EACH * cores)))
    request = make_request(config, {})
    machine, each_mib = plan.machine, config.dataloader.worker_shm_mib
    bounds = (
        *bound_by_memory(request, machine, ranks),
        *bound_by_shm(machine, most * ranks, ranks, each_mib),
        *bound_by_files(machine),
    )
    tight = min(bounds, key=lambda bound: bound.max_workers, default=None)
    if tight is not None and tight.max_workers < most:
        return max(1, tight.max_workers), tight.what
    return most, f"{EACH} for each of a rank's cores, and at least {LEAST}"


def count_share(plan: Plan) -> float:
    """Return the cores of the rank that has fewest, shared ones and a quota on CPU time counted in part."""
    core_of = {cpu.id: cpu.core for cpu in plan.machine.cpus}
    sets = [{core_of[cpu] for cpu in rank.worker_cpus if cpu in core_of} for rank in plan.ranks]
    even = len(set().union(*sets)) / len(sets)
    quota = plan.machine.limits.cpus
    return min(even, *map(len, sets), *([] if quota is None else [quota / len(sets)]))
