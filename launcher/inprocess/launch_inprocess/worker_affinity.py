"""DataLoader workers run on the CPUs that the plan has for them, the rank's own process on its own."""

from __future__ import annotations

import os

from .import_hook import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Callable, Mapping
    from types import ModuleType

TELLER = "torch.utils.data._utils.signal_handling"
"""Its `_set_worker_pids` is told of the workers of every loader, torchdata's too, once they have started."""
PASSES = 4
"""Looks at a worker's threads at most: one may have started another before it was moved."""


def place_workers(environ: Mapping[str, str]) -> None:
    """Have the workers that this very process starts moved to the CPUs that the plan has for them."""
    plan = environ.get("LAUNCH_RANK_PLAN")
    if plan:
        crew = Crew(plan)
        when_imported(TELLER, crew.follow_starts)
        when_imported("torch.utils.data.dataloader", crew.judge_anew)


class Crew:
    """The workers of a rank."""

    def __init__(self, plan: str) -> None:
        self.plan = plan
        self.process = os.getpid()
        self.home = os.sched_getaffinity(0)
        """Where the rank's own process is, and its children begin."""

    def read_cpus(self, name: str = "worker_cpus") -> set[int]:
        """Return where workers belong; empty where they begin there. Raises KeyError and the like."""
        import json  # torch has imported it by now

        cpus = parse_cpulist(json.loads(self.plan)[name])
        return set() if cpus == self.home else cpus

    def follow_starts(self, module: ModuleType) -> None:
        """Have workers moved as soon as torch notes their process ids, before it gives them work.

        Done from here, it is the same for fork, spawn and forkserver, and pickles nothing.
        """
        cpus = self.read_cpus()
        note = module._set_worker_pids

        def note_and_move(loader: int, pids: tuple[int, ...]) -> None:
            note(loader, pids)
            if os.getpid() == self.process:
                for pid in pids:
                    move_process(pid, self.home, cpus)

        if cpus:
            module._set_worker_pids = note_and_move  # type: ignore[attr-defined]  # as above

    def judge_anew(self, module: ModuleType) -> None:
        """Let torch's warning of too many workers not count the rank's own CPUs alone.

        The CPUs that workers get count, and so do those that the rank would have had without us.
        """
        most = max(len(self.read_cpus("worker_cpus")), len(self.read_cpus("cpus_before")))
        if most:
            name = "check_worker_number_rationality"
            setattr(module.DataLoader, name, Check(vars(module.DataLoader)[name], self, most))

    def is_home(self) -> bool:
        """Tell whether this is the rank's own process, and runs where it was started."""
        return os.getpid() == self.process and os.sched_getaffinity(0) == self.home


class Check:
    """torch's method that warns, left out where it would count the wrong CPUs.

    A method around it would be what its warning points at, and what filters for torch's modules miss.
    """

    def __init__(self, method: Callable[..., None], crew: Crew, most: int) -> None:
        self.method = method
        self.crew = crew
        self.most = most

    def __get__(self, loader: object, owner: type | None = None) -> Callable[..., None]:
        """Return the method of a loader, or one that does nothing."""
        if 0 < getattr(loader, "num_workers", 0) <= self.most and self.crew.is_home():
            return pass_over
        return self.method.__get__(loader, owner)  # type: ignore[no-any-return]  # a function's own


def pass_over() -> None:
    """Have no objection."""


def move_process(pid: int, home: set[int], cpus: set[int]) -> None:
    """Move all threads of a process to its CPUs, one that has just begun included."""
    for _ in range(PASSES):
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:  # it has ended
            return
        if not [thread for thread in threads if move_thread(int(thread), home, cpus)]:
            return


def move_thread(thread: int, home: set[int], cpus: set[int]) -> bool:
    """Move a thread, and tell whether that was done; one that is refused, or has ended, is left alone.

    So is one that is not where it began: somebody has bound it, or had bound the rank itself.
    """
    try:
        if os.sched_getaffinity(thread) != home:
            return False
        os.sched_setaffinity(thread, cpus)
    except OSError:
        return False
    return True


def parse_cpulist(text: str) -> set[int]:
    """Read a cpulist as plans have it, `0-3,8`; raises ValueError for anything else."""
    spans = [part.partition("-") for part in text.split(",")]
    return {number for low, _, high in spans for number in range(int(low), int(high or low) + 1)}
