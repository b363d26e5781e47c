"""Garbage collection in a rank: at the same step on every rank, and never over what has come to stay.

A rank that collects keeps all others waiting at the next collective. Sources: S. Bekman, Machine Learning
Engineering Open Book, on collecting in step; CPython's documentation of `gc.freeze`.
"""

from __future__ import annotations

import atexit
import gc
import os
from time import monotonic

from .import_hook import Suppressed, find_cuda, replace
from .step_counter import mark_step, on_step, on_takeover

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

POLICIES = ("synchronized", "disabled", "frozen", "default")
WARMUP, EVERY = 30, 50
MAX_DIGITS = 9
SECOND_REVIEW = 16
"""The second collection in step, after the first, that looks at the frozen objects; then at 32, 64, …"""
GROWTH = 1.1
"""Growth of memory since all objects were looked at last that has a collection in step look at them again."""
real_collect, real_get_objects, real_get_referrers = gc.collect, gc.get_objects, gc.get_referrers


class Policy:
    """What this process does about garbage."""

    def __init__(self, name: str, warmup: int, every: int, rank: str | None) -> None:
        self.name, self.warmup, self.every = name, warmup, every
        self.rank = rank
        """For the lines on stderr that report collections; None for no lines."""
        self.found = self.left = gc.isenabled(), gc.get_threshold()
        """The collector's state at the start, and as this policy has set it last."""
        self.frozen_at_start = gc.get_freeze_count()
        self.shared = self.frozen_at_start > 0
        """What was imported before this rank was forked is frozen, so that its memory stays shared."""
        self.active = True
        """The program has not taken over the collector."""
        self.held = self.frozen = False
        """The warm-up is over, and what there was then is frozen."""
        self.step = self.began = 0
        """The last step, and the one before this phase."""
        self.total = self.rounds = 0
        """Collections, and those in step in this phase."""
        self.memory: dict[str, int] = {}
        """What was in use after all objects were looked at last, as `_read_memory` returns it."""

    def start(self) -> None:
        """Act from the next step on."""
        if self.name == "disabled":
            gc.disable()
            self.left = False, self.found[1]
            self.held = True
        else:
            for replacement, real in REPLACEMENTS:  # which leave out what is frozen
                replace(gc, real.__name__, replacement, traced=False)
        on_step(self.act_after_step)
        on_takeover(self.begin_phase, 2 * (self.every or EVERY))
        os.register_at_fork(after_in_child=self.reset_in_child)
        # At its end the interpreter collects once more, and finalizers run.
        atexit.register(self.release)

    def act_after_step(self, step: int) -> None:
        """Do what is due after a step."""
        self.step = step
        since = step - self.began
        if self.held:
            is_due = self.every > 0 and self.name != "frozen" and since % self.every == 0
        else:
            is_due = since >= self.warmup
        if not self.active or not is_due or _is_capturing():
            return
        has_frozen = not self.held and gc.get_freeze_count() > self.frozen_at_start
        if has_frozen or (gc.isenabled(), gc.get_threshold()) != self.left:
            self.active = False
            self.release()
            self._write_line("gc is the program's own: left alone")
        elif not self.held:
            self.held = True
            # The first collection in step comes soon, and looks at the old objects.
            self.freeze(young=self.name == "synchronized" and self.every > 0)
        else:
            self._collect_in_step()

    def _collect_in_step(self) -> None:
        """Collect what is not frozen; look at all objects at doubling distances, or if memory has grown."""
        self.rounds += 1
        is_review = self.rounds == 1 or (self.rounds >= SECOND_REVIEW and not self.rounds & (self.rounds - 1))
        if self.name == "synchronized" and (is_review or not self.frozen):
            self.freeze()
            return
        self.collect()
        now = _read_memory() if self.frozen else {}
        if any(now[kind] > GROWTH * size for kind, size in self.memory.items() if kind in now):
            self.freeze()

    def freeze(self, *, young: bool = False) -> None:
        """Collect among all objects, or the `young` ones alone, and freeze those that stay.

        CPython collects the oldest generation only once the objects that have come to it are a quarter of
        those that it held (gc_collect_generations in gcmodule.c), and does not count the frozen ones among
        these: without a higher threshold, each tenth collection of the middle generation would be one of the
        oldest. The younger generations are collected as before: their garbage may hold tensors of any size,
        so that a delay has no bound in memory.
        """
        began = monotonic()
        gc.unfreeze()
        freed = real_collect(1 if young else 2)
        gc.freeze()
        self.frozen = True
        count = gc.get_freeze_count()
        if self.name == "synchronized":
            self.memory = _read_memory()
            youngest, middle, oldest = self.found[1]
            gc.set_threshold(youngest, middle, max(oldest, count // (4 * max(1, youngest) * max(1, middle))))
            self.left = self.found[0], gc.get_threshold()
        self._report(began, freed, f", {count} are frozen")

    def begin_phase(self, step: int) -> None:
        """Warm up again: the leading optimizer is gone, and what is frozen may have been its model's."""
        self.began = step
        if self.active and self.frozen:
            self.release()
            self.held, self.rounds, self.left = False, 0, self.found
            self.collect(", a new phase begins")

    def release(self) -> None:
        """Undo what is still as this policy left it."""
        if gc.isenabled() == self.left[0] != self.found[0]:
            gc.enable() if self.found[0] else gc.disable()
        if gc.get_threshold() == self.left[1]:
            gc.set_threshold(*self.found[1])
        self.thaw()

    def thaw(self, *, shared: bool = False) -> None:
        """Unfreeze what this policy has frozen, and with `shared` what was before the rank was forked.

        The next collection in step freezes again. Not at once: that would freeze garbage which has not been
        collected.
        """
        if self.frozen or (shared and self.shared):
            self.frozen = self.shared = False
            gc.unfreeze()

    def reset_in_child(self) -> None:
        """Give a forked child the collector that it would have without us."""
        self.release()
        self.active = False
        for replacement, real in REPLACEMENTS:  # unless the program has replaced them itself since
            if getattr(gc, real.__name__, None) is replacement:
                setattr(gc, real.__name__, real)

    def collect(self, more: str = "") -> None:
        """Collect among the objects that are not frozen."""
        began = monotonic()
        self._report(began, real_collect(), more)

    def _report(self, began: float, freed: int, more: str) -> None:
        """Count a collection, and print its line."""
        self.total += 1
        self._write_line(f"{freed} objects collected in {1e3 * (monotonic() - began):.1f} ms{more}")

    def _write_line(self, text: str) -> None:
        """Print a line to stderr if LAUNCH_GC asks for it."""
        if self.rank is not None:
            with Suppressed(OSError):
                os.write(2, f"launch: rank {self.rank}: step {self.step}: {text}\n".encode())


policy: Policy | None = None
"""The one of this interpreter, as its collector is."""


def start_collector(environ: Mapping[str, str]) -> None:
    """Start the policy of LAUNCH_GC; raises ValueError if that is none."""
    global policy  # noqa: PLW0603 - an interpreter has one collector
    name, warmup, every, log = parse_policy(environ.get("LAUNCH_GC") or "default")
    if name != "default":
        policy = Policy(name, warmup, every, environ.get("RANK", "0") if log else None)
        policy.start()


def parse_policy(text: str) -> tuple[str, int, int, bool]:
    """Read name, warm-up, period and log of `synchronized,warmup=30,every=50,log`; raises ValueError.

    `launcher.plan.variables` has the same grammar, and a test compares the two.
    """
    name, *options = text.split(",")
    if name not in POLICIES:
        raise ValueError(f"no policy {name!r}")
    steps = {"warmup": WARMUP, "every": EVERY}
    for option in options:
        key, _, value = option.partition("=")
        if option == "log":
            continue
        if key not in steps or not value.isascii() or not value.isdigit() or len(value) > MAX_DIGITS:
            raise ValueError(f"no option {option!r}")
        steps[key] = int(value)
    return name, steps["warmup"], steps["every"], "log" in options


def end_step(*, now: bool = False) -> bool:
    """Mark the end of a step, and tell whether garbage was collected; `now` collects at once.

    From the first mark on, the optimizer's steps do not count. Without a policy nothing is collected, and the
    steps still count for who watches the rank.
    """
    if policy is None or not policy.active:
        if not now:
            mark_step()
        return False
    before = policy.total
    if not now:
        mark_step()
    elif policy.frozen:
        policy.freeze()
    else:
        policy.collect()
    return now or policy.total > before


def _is_capturing() -> bool:
    """Tell whether a CUDA graph is being captured, during which nothing on the GPU may be freed."""
    cuda = find_cuda()
    return cuda is not None and bool(cuda.is_current_stream_capturing())


def _read_memory() -> dict[str, int]:
    """Return the memory in use, in bytes: `resident` of this process, `cuda` of its tensors on its GPU.

    What cannot be read is left out.
    """
    found = {}
    with Suppressed(Exception):
        # No file object, which warns that it is not closed if a signal's handler raises before it is.
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            found["resident"] = int(os.read(descriptor, 200).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        finally:
            os.close(descriptor)
        if cuda := find_cuda():
            found["cuda"] = int(cuda.memory_allocated())
    return found


class Collect:
    """What the program calls as `gc.collect`. A Python function in a class would be a method; this is not.

    One of `gc.callbacks` would not do: an exception of a signal's handler in it (`sys.exit`) is lost.
    """

    def __call__(self, *args: int, **kwargs: int) -> int:
        """Collect as the real one does; a full collection includes frozen objects."""
        generation = args[0] if args else kwargs.get("generation", 2)
        if policy is None or not policy.frozen or generation != 2:
            return real_collect(*args, **kwargs)
        gc.unfreeze()
        try:
            return real_collect(*args, **kwargs)
        finally:
            if policy.frozen:
                gc.freeze()

    def __reduce__(self) -> str:
        """Pickle it by name, as the real one."""
        return "collect"


def get_objects(*args: int | None, **kwargs: int | None) -> list[object]:
    """What the program calls as `gc.get_objects`: it finds what is frozen, too."""
    if policy is not None:
        policy.thaw(shared=True)
    return real_get_objects(*args, **kwargs)


def get_referrers(*objects: object) -> list[object]:
    """What the program calls as `gc.get_referrers`; the tuple of this call's arguments is left out."""
    if policy is not None:
        policy.thaw(shared=True)
    return [found for found in real_get_referrers(*objects) if found is not objects]


REPLACEMENTS: tuple[tuple[Callable[..., object], Callable[..., object]], ...] = (
    (Collect(), real_collect),
    (get_objects, real_get_objects),
    (get_referrers, real_get_referrers),
)
