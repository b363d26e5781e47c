"""Counts the program's steps: those of its leading optimizer, or the boundaries that it marks itself."""

from __future__ import annotations

from _weakref import ref  # `weakref` costs a millisecond

from .import_hook import is_foreign, when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    Action = Callable[[int], object]

PATIENCE = 100
"""Steps of another optimizer without one of the leader, after which that other one leads.

If none lives that long, as many rounds of others' steps end the leader's phase, and none begins.
"""


class StepCounter:
    """The steps of this process.

    The first optimizer that steps leads. Who leads follows from steps alone, never from when an object
    is freed, so that all ranks agree.
    """

    def __init__(self) -> None:
        self.step = 0
        self.patience = PATIENCE
        self.actions: list[Action] = []
        self.takeovers: list[Action] = []
        self.marked = False
        """The program marks its steps itself."""
        self.leader: Callable[[], object] | None = None
        self.others: dict[int, tuple[Callable[[], object], int, int]] = {}
        """Optimizers by their ids: their steps since the leader's last one, and their last round."""
        self.rounds = 0
        """Rounds since then: one ends when an optimizer steps a second time in it."""

    def count_step(self, optimizer: object, _args: object = None, _kwargs: object = None) -> None:
        """Count an optimizer's step if it leads; torch's hook."""
        if self.marked:
            return
        if self.leader is None:
            self.leader = ref(optimizer)
        elif self.leader() is not optimizer:
            if not self._count_other(optimizer):
                return
            self.leader = ref(optimizer)
            _call_actions(self.takeovers, self.step)
        if self.others:
            self.others.clear()
            self.rounds = 0
        self.advance()

    def _count_other(self, optimizer: object) -> bool:
        """Count a step of an optimizer that does not lead; return whether it leads from now on."""
        known, count, last = self.others.get(id(optimizer), (None, 0, -1))
        if known is None or known() is not optimizer:
            known, count, last = ref(optimizer), 0, -1
        if last == self.rounds:
            self.rounds += 1
            if self.rounds == self.patience:
                _call_actions(self.takeovers, self.step)
        self.others[id(optimizer)] = known, count + 1, self.rounds
        return count + 1 >= self.patience

    def advance(self) -> None:
        """End a step."""
        self.step += 1
        _call_actions(self.actions, self.step)

    def stop(self) -> None:
        """Stop counting, in a forked child."""
        self.actions.clear()
        self.takeovers.clear()


COUNTER = StepCounter()
"""One for the interpreter, as torch's hook is."""


def on_step(action: Action) -> None:
    """Have `action(step)` called after each step of the leading optimizer; the first step is 1.

    What the action raises is dropped, but not what a signal's handler raises in it, or what is thrown into
    this thread.
    """
    if not COUNTER.actions:
        when_imported("torch.optim.optimizer", _register_step_hook)
    COUNTER.actions.append(action)


def on_takeover(action: Action, patience: int) -> None:
    """Have `action(step)` called when the leader's phase is over.

    It is over when another optimizer leads, before that one's step counts; or when many short-lived ones have
    stepped as long, as in a search among hyperparameters.
    """
    COUNTER.patience = patience
    COUNTER.takeovers.append(action)


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


def _call_actions(actions: list[Action], step: int) -> None:
    """Call the actions of a step; a failure of this package does not end the program."""
    for action in actions:
        try:
            action(step)
        except Exception as error:
            if is_foreign(error):
                raise
