"""Replacements for the functions of `gc` that leave out frozen objects.

One of `gc.callbacks` would not do: an exception of a signal's handler in it (`sys.exit`) is lost.
"""

from __future__ import annotations

import gc

from .copied_names import replace_copies

TYPE_CHECKING = False
if TYPE_CHECKING:  # these would cost each start of an interpreter some milliseconds
    from collections.abc import Callable

    from .garbage_collection import Policy

real_collect, real_get_objects, real_get_referrers = gc.collect, gc.get_objects, gc.get_referrers

freezer: Policy | None = None
"""The policy that has frozen objects."""


class Collect:
    """What the program calls as `gc.collect`. A Python function in a class would be a method; this is not."""

    def __call__(self, *args: int, **kwargs: int) -> int:
        """Collect as the real one does; a full collection includes frozen objects."""
        generation = args[0] if args else kwargs.get("generation", 2)
        if freezer is None or not freezer.frozen or generation != 2:
            return real_collect(*args, **kwargs)
        gc.unfreeze()
        try:
            return real_collect(*args, **kwargs)
        finally:
            if freezer.frozen:
                gc.freeze()

    def __reduce__(self) -> str:
        """Pickle it by name, as the real one."""
        return "collect"


def get_objects(*args: int | None, **kwargs: int | None) -> list[object]:
    """What the program calls as `gc.get_objects`."""
    if freezer is not None:
        freezer.show_all()
    return real_get_objects(*args, **kwargs)


def get_referrers(*objects: object) -> list[object]:
    """What the program calls as `gc.get_referrers`; the tuple of this call's arguments is left out."""
    if freezer is not None:
        freezer.show_all()
    return [found for found in real_get_referrers(*objects) if found is not objects]


REPLACEMENTS: tuple[tuple[Callable[..., object], Callable[..., object]], ...] = (
    (Collect(), real_collect),
    (get_objects, real_get_objects),
    (get_referrers, real_get_referrers),
)


def replace_functions(policy: Policy) -> None:
    """Replace the functions of gc that leave out what is frozen."""
    global freezer  # noqa: PLW0603 - an interpreter has one collector
    freezer = policy
    for replacement, real in REPLACEMENTS:
        for name in ("__module__", "__name__", "__qualname__"):  # pickle finds it by these
            setattr(replacement, name, getattr(real, name))
        # inspect.signature follows the first; torch.compile treats a builtin function as the second says.
        replacement.__dict__.update(__wrapped__=real, _torchdynamo_disable=True)
        setattr(gc, real.__name__, replacement)
        replace_copies(real, replacement)


def restore_functions() -> None:
    """Restore the real functions, unless the program has replaced them itself since."""
    for replacement, real in REPLACEMENTS:
        if getattr(gc, real.__name__, None) is replacement:
            setattr(gc, real.__name__, real)
