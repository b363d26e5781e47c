"""Counts the program's steps: those of its leading optimizer, or the boundaries that it marks itself."""

from __future__ import annotations

from _weakref import ref  # `weakref` costs a millisecond

from .import_hook import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    Action = Callable[[int], object]

PATIENCE = 100
"""Steps of another optimizer without one of the leader, after which that other one leads."""


class StepCounter:
    """The steps of this process.

    The first optimizer that steps leads. Who leads follows from steps alone, never from when an object
    is freed, so that all ranks agree.
    """

    def __init__(self) -> None:
        self.step = 0
        self.actions: list[Action] = []
        self.marked = False
        """The program marks its steps itself."""
        self.leader: Callable[[], object] | None = None
        self.others: dict[int, tuple[Callable[[], object], int]] = {}
        """Optimizers by their ids, with their steps since the leader's last one."""

    def count_step(self, optimizer: object, _args: object = None, _kwargs: object = None) -> None:
        """Count an optimizer's step if it leads; torch's hook."""
        if self.marked:
            return
        if self.leader is None:
            self.leader = ref(optimizer)
        elif self.leader() is not optimizer:
            known, count = self.others.get(id(optimizer), (None, 0))
            count = count + 1 if known is not None and known() is optimizer else 1
            self.others[id(optimizer)] = ref(optimizer), count
            if count < PATIENCE:
                return
            self.leader = ref(optimizer)
        self.others.clear()
        self.advance()

    def advance(self) -> None:
        """End a step.

        A failure of this package does not end the program. Other exceptions come from a signal's handler that
        interrupted it, or were thrown into this thread.
        """
        self.step += 1
        for action in self.actions:
            try:
                action(self.step)
            except Exception as error:
                trace = error.__traceback__
                while trace is not None and trace.tb_next is not None:
                    trace = trace.tb_next
                name = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
                is_own = str(name).rpartition(".")[0] == __name__.rpartition(".")[0]
                if type(error).__module__ != "builtins" or not is_own:
                    raise


COUNTER = StepCounter()
"""One for the interpreter, as torch's hook is."""


def on_step(action: Action) -> None:
    """Have `action(step)` called after each step of the leading optimizer; the first step is 1.

    What the action raises is dropped, except for what a signal's handler of the program raises in it.
    """
    if not COUNTER.actions:
        when_imported("torch.optim.optimizer", _register_step_hook)
    COUNTER.actions.append(action)


def mark_step() -> None:
    """End a step of a program that marks its steps; from the first time on, the optimizer's do not count."""
    COUNTER.marked = True
    COUNTER.advance()


def _register_step_hook(module: ModuleType) -> None:
    """Register for the steps of all optimizers; torch.compile is to leave the hook alone."""
    handle = module.register_optimizer_step_post_hook(COUNTER.count_step)

    def exclude(dynamo: ModuleType) -> None:
        hidden = dynamo.disable(COUNTER.count_step)
        handle.remove()
        module.register_optimizer_step_post_hook(hidden)

    when_imported("torch._dynamo", exclude)
