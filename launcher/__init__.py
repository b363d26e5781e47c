"""`launch` starts distributed PyTorch training, every rank in its right place.

For programs that want to know of it; they run without `launch` just as well:

    launcher.num_workers()    # DataLoader workers for this rank
    launcher.rank_plan()      # its CPUs, memory, GPU and NIC, as the plan has them
    launcher.run_dir()        # the run directory, the same for all ranks, attempts and requeues
    launcher.collect()        # at the end of a step: garbage is collected when it is due, on all ranks alike
"""

# The shim, which counts milliseconds, imports this file: what functions need is imported in them.
import os
import sys

from launcher.protocol import LAUNCH_NUM_WORKERS, LAUNCH_RANK_PLAN, LAUNCH_RUN_DIR

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` costs each start of a rank some milliseconds
    from pathlib import Path

__all__ = ["collect", "num_workers", "rank_plan", "run_dir"]


def collect(*, now: bool = False) -> bool:
    """Mark the end of a step, for the group `gc`'s policy; return whether garbage was collected.

    For programs whose steps are not those of an optimizer: from the first call on, optimizers' steps do not
    count. `now` collects at once. Where no policy is at work (outside of launch, `gc=default`, or in a
    program that handles gc itself) nothing happens, and False is returned.
    """
    collector = sys.modules.get("launch_inprocess.garbage_collection")
    return collector is not None and bool(collector.end_step(now=now))


def num_workers(default: int = 2) -> int:
    """Return how many DataLoader workers this rank is to have; `default` outside of launch."""
    text = os.environ.get(LAUNCH_NUM_WORKERS, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else default


def run_dir() -> "Path | None":
    """Return the run directory, which LAUNCH_RUN_DIR names; None outside of launch.

    It is the same for all ranks, attempts and requeues. What is written below `checkpoints` in it counts as
    progress where a job is requeued.
    """
    from pathlib import Path

    text = os.environ.get(LAUNCH_RUN_DIR)
    return Path(text) if text else None


def rank_plan() -> dict[str, object] | None:
    """Return this rank's part of the plan, as `launch plan format=json` has it; None outside of launch.

    Its keys are local_rank, gpu, cpus, worker_cpus, memory, num_workers, omp_num_threads and nic. CPUs are in
    the kernel's list notation: `48-55,176-183`.
    """
    import json

    from launcher.rank.interpreter_hook import TOLD

    text = os.environ.get(LAUNCH_RANK_PLAN, "")
    try:
        plan = json.loads(text)
    except ValueError:
        return None
    return {name: plan.get(name) for name in TOLD} if isinstance(plan, dict) else None
