"""DataLoader workers run on the CPUs that the plan has for them, the rank's own process on its own."""

from __future__ import annotations

import os

from .import_hook import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Callable, Mapping
    from types import ModuleType

SIGNAL_HANDLING = "torch.utils.data._utils.signal_handling"
"""Its `_set_worker_pids` gets the workers' PIDs of every loader, torchdata's too, once they have started."""
MAX_PASSES = 4
"""Passes over a worker's threads: one may have started another before it was moved."""


def place_workers(environ: Mapping[str, str]) -> None:
    """Have the workers that this very process starts moved to the CPUs that the plan has for them."""
    plan = environ.get("LAUNCH_RANK_PLAN")
    if plan:
        placement = WorkerPlacement(plan)
        when_imported(SIGNAL_HANDLING, placement.move_started_workers)
        when_imported("torch.utils.data.dataloader", placement.correct_count_check)


class WorkerPlacement:
    """Where the workers of a rank belong."""

    def __init__(self, plan: str) -> None:
        self.plan = plan
        self.process = os.getpid()
        self.own_cpus = os.sched_getaffinity(0)
        """CPUs of the rank's own process, on which its children start."""

    def read_cpus(self, name: str = "worker_cpus") -> set[int]:
        """Return CPUs of the plan; empty if they are the rank's own. Raises KeyError and the like."""
        import json  # torch has imported it by now

        cpus = parse_cpulist(json.loads(self.plan)[name])
        return set() if cpus == self.own_cpus else cpus

    def move_started_workers(self, module: ModuleType) -> None:
        """Have workers moved as soon as torch notes their PIDs, before it gives them work.

        From here, it is the same for fork, spawn and forkserver, and pickles nothing.
        """
        cpus = self.read_cpus()
        function = "_set_worker_pids"
        original = getattr(module, function)

        def note_and_move(loader: int, pids: tuple[int, ...]) -> None:
            original(loader, pids)
            if os.getpid() == self.process:
                for pid in pids:
                    move_process(pid, self.own_cpus, cpus)

        if cpus:
            setattr(module, function, note_and_move)

    def correct_count_check(self, module: ModuleType) -> None:
        """Leave out torch's warning of too many workers if it counts the rank's own CPUs alone.

        The CPUs that workers get count, and so do those that the rank would have without us.
        """
        max_workers = max(len(self.read_cpus("worker_cpus")), len(self.read_cpus("cpus_before")))
        if max_workers:
            name = "check_worker_number_rationality"
            check = WorkerCountCheck(vars(module.DataLoader)[name], self, max_workers)
            setattr(module.DataLoader, name, check)

    def is_unmoved(self) -> bool:
        """Tell whether this is the rank's own process, and runs on the CPUs that it started on."""
        return os.getpid() == self.process and os.sched_getaffinity(0) == self.own_cpus


class WorkerCountCheck:
    """torch's method that warns, left out if it would count the wrong CPUs.

    It is a descriptor: a wrapping method would be where the warning points to, and filters for torch's
    modules would miss it.
    """

    def __init__(self, method: Callable[..., None], placement: WorkerPlacement, max_workers: int) -> None:
        self.method = method
        self.placement = placement
        self.max_workers = max_workers

    def __get__(self, loader: object, owner: type | None = None) -> Callable[..., None]:
        """Return the method of a loader, or one that does nothing."""
        if 0 < getattr(loader, "num_workers", 0) <= self.max_workers and self.placement.is_unmoved():
            return do_nothing
        method: Callable[..., None] = self.method.__get__(loader, owner)
        return method


def do_nothing() -> None:
    """Do nothing, in place of the check."""


def move_process(pid: int, source: set[int], target: set[int]) -> None:
    """Move all threads of a process from one set of CPUs to another, also those that it starts meanwhile."""
    for _ in range(MAX_PASSES):
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:  # it has ended
            return
        if not [thread for thread in threads if move_thread(int(thread), source, target)]:
            return


def move_thread(thread: int, source: set[int], target: set[int]) -> bool:
    """Move a thread, and return whether that was done; one that has ended or may not be moved stays.

    So is one that is not on `source`: somebody has bound it, or had bound the rank itself.
    """
    try:
        if os.sched_getaffinity(thread) != source:
            return False
        os.sched_setaffinity(thread, target)
    except OSError:
        return False
    return True


def parse_cpulist(text: str) -> set[int]:
    """Read a cpulist as plans have it, `0-3,8`; raises ValueError for anything else."""
    spans = [part.partition("-") for part in text.split(",")]
    return {number for low, _, high in spans for number in range(int(low), int(high or low) + 1)}
