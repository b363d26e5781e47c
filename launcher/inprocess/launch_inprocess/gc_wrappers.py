"""What the program calls of `gc` acts on all objects, frozen ones too, as it does without a policy.

One of `gc.callbacks` would not do: what a signal's handler raises in it (`sys.exit`) is lost.
"""

from __future__ import annotations

import gc

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Callable

    from .garbage_collection import Policy

real_collect, real_get_objects, real_get_referrers = gc.collect, gc.get_objects, gc.get_referrers

freezer: Policy | None = None
"""Whose frozen objects there are."""


class Collect:
    """What the program calls as `gc.collect`: no function of Python's, which in a class would be a method."""

    def __call__(self, *words: int, **named: int) -> int:
        """Collect as the real one does, among frozen objects too where it is to look at all."""
        generation = words[0] if words else named.get("generation", 2)
        if freezer is None or not freezer.frozen or generation != 2:
            return real_collect(*words, **named)
        gc.unfreeze()
        try:
            return real_collect(*words, **named)
        finally:
            if freezer.frozen:
                gc.freeze()

    def __reduce__(self) -> str:
        """Return what is pickled: gc's own, by its name."""
        return "collect"


def get_objects(*words: int | None, **named: int | None) -> list[object]:
    """What the program calls as `gc.get_objects`."""
    if freezer is not None:
        freezer.thaw()
    return real_get_objects(*words, **named)


def get_referrers(*objects: object) -> list[object]:
    """What the program calls as `gc.get_referrers`; the tuple of this call's own arguments is none."""
    if freezer is not None:
        freezer.thaw()
    return [found for found in real_get_referrers(*objects) if found is not objects]


REPLACED: tuple[tuple[Callable[..., object], Callable[..., object]], ...] = (
    (Collect(), real_collect),
    (get_objects, real_get_objects),
    (get_referrers, real_get_referrers),
)


def replace_functions(policy: Policy) -> None:
    """Put functions that act on everything in the place of those of gc that leave out what is frozen."""
    global freezer  # noqa: PLW0603 - an interpreter has one collector
    freezer = policy
    for ours, real in REPLACED:
        for name in ("__module__", "__name__", "__qualname__", "__doc__", "__self__", "__text_signature__"):
            setattr(ours, name, getattr(real, name))
        ours.__wrapped__ = real  # type: ignore[attr-defined]  # for inspect.signature
        ours._torchdynamo_disable = True  # type: ignore[attr-defined]  # as a builtin function is for it
        setattr(gc, real.__name__, ours)


def restore_functions() -> None:
    """Undo that, but for what the program has replaced itself since."""
    for ours, real in REPLACED:
        if getattr(gc, real.__name__, None) is ours:
            setattr(gc, real.__name__, real)
