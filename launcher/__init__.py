"""What a program can ask of `launch`. Without `launch` it runs just as well, with the values given here.

launcher.num_workers()    # DataLoader workers for this rank; 2
launcher.rank_plan()      # its CPUs, memory, GPU and NIC, as the plan has them; None
launcher.run_dir()        # the run directory, the same for all ranks, attempts and requeues; None
launcher.step()           # the end of a step, for who watches the job and for garbage collection
launcher.collect()        # the end of a step, at which all ranks collect garbage if it is due; False
"""

# The shim imports this file at every rank's start: what a function needs is imported in it.
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` costs each start of a rank some milliseconds
    from pathlib import Path

__all__ = ["collect", "num_workers", "rank_plan", "run_dir", "step"]


def num_workers(default: int = 2) -> int:
    """Return how many DataLoader workers this rank is to have; `default` outside of launch."""
    from launcher.protocol import LAUNCH_NUM_WORKERS

    text = os.environ.get(LAUNCH_NUM_WORKERS, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else default


def rank_plan() -> dict[str, object] | None:
    """Return this rank's part of the plan, as `launch plan format=json` has it; None outside of launch.

    Its keys are local_rank, gpu, cpus, worker_cpus, memory, num_workers, omp_num_threads and nic. CPUs are in
    the kernel's list notation: `48-55,176-183`.
    """
    import json

    from launcher.protocol import LAUNCH_RANK_PLAN, RANK_PLAN_KEYS

    try:
        plan = json.loads(os.environ.get(LAUNCH_RANK_PLAN, ""))
    except ValueError:
        return None
    return {name: plan.get(name) for name in RANK_PLAN_KEYS.split()} if isinstance(plan, dict) else None


def run_dir() -> "Path | None":
    """Return the run directory, which is in LAUNCH_RUN_DIR; None outside of launch.

    It is the same for all ranks, attempts and requeues. What is written below `checkpoints` in it counts as
    progress if a job is requeued.
    """
    from pathlib import Path

    from launcher.protocol import LAUNCH_RUN_DIR

    text = os.environ.get(LAUNCH_RUN_DIR)
    return Path(text) if text else None


def collect(*, now: bool = False) -> bool:
    """Mark the end of a step, for the group `gc`'s policy; return whether garbage was collected.

    For programs whose steps are not those of an optimizer: from the first call on, optimizers' steps do not
    count. `now` collects at once. Without a policy (outside of launch, with `gc=default`, or in a program
    that handles gc itself) nothing happens, and False is returned.
    """
    collector = sys.modules.get("launch_inprocess.garbage_collection")
    return collector is not None and bool(collector.end_step(now=now))


def step() -> None:
    """Mark the end of a step, as `collect` does, for programs whose steps are not those of an optimizer.

    `launch watch` and `launch status` show a rank's steps, and if they stop, who holds the others up. Garbage
    is collected if the group `gc`'s policy has it due. From the first call on, optimizers' steps do not
    count. A program calls either this or `collect()` once a step. Outside of launch nothing happens.
    """
    counter = sys.modules.get("launch_inprocess.step_counter")
    if counter is not None:
        counter.mark_step()
