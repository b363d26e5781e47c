"""Garbage collection in a rank: at the same step on every rank, and never over what has come to stay.

A rank that collects keeps all others waiting at the next collective. Sources: S. Bekman, Machine Learning
Engineering Open Book, on collecting in step; CPython's documentation of `gc.freeze`.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from time import monotonic

from .gc_functions import real_collect, replace_functions, restore_functions
from .step_counter import mark_step, on_step, on_takeover

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

POLICIES = ("synchronized", "disabled", "frozen", "default")
WARMUP, EVERY = 30, 50
MAX_DIGITS = 9
SECOND_REVIEW = 16
"""The second collection in step, after the first, that looks at the frozen objects; then at 32, 64, …"""
GROWTH = 1.1
"""Growth of memory since all objects were looked at last that has a collection in step look at them again."""


class Policy:
    """What this process does about garbage."""

    def __init__(self, name: str, warmup: int = WARMUP, every: int = EVERY, rank: str | None = None) -> None:
        self.name = name
        self.warmup = warmup
        self.every = every
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
        """What was in use after all objects were looked at last, as `read_memory` returns it."""

    def start(self) -> None:
        """Act from the next step on."""
        if self.name == "disabled":
            gc.disable()
            self.left = False, self.found[1]
            self.held = True
        else:
            replace_functions(self)
        on_step(self.act_after_step)
        on_takeover(self.begin_phase, 2 * (self.every or EVERY))
        os.register_at_fork(after_in_child=self.reset_in_child)
        # At its end the interpreter collects once more, and finalizers run.
        atexit.register(self.release)

    def act_after_step(self, step: int) -> None:
        """Do what is due after a step."""
        self.step = step
        if not self.active or not self.is_collection_due(step - self.began) or is_capturing():
            return
        if self.is_taken_over():
            self.hand_over()
        elif not self.held:
            self.held = True
            # The first collection in step comes soon, and looks at the old objects.
            self.freeze(young=self.name == "synchronized" and self.every > 0)
        else:
            self.collect_in_step()

    def is_collection_due(self, step: int) -> bool:
        """Tell whether anything is due after a step of this phase."""
        if not self.held:
            return step >= self.warmup
        return self.every > 0 and self.name != "frozen" and step % self.every == 0

    def is_taken_over(self) -> bool:
        """Tell whether the program handles the collector itself."""
        if (gc.isenabled(), gc.get_threshold()) != self.left:
            return True
        return not self.held and gc.get_freeze_count() > self.frozen_at_start

    def collect_in_step(self) -> None:
        """Collect what is not frozen; look at all objects at doubling distances, or if memory has grown."""
        self.rounds += 1
        if self.name == "synchronized" and (is_review(self.rounds) or not self.frozen):
            self.freeze()
            return
        began = monotonic()
        self.report(began, real_collect())
        if self.frozen and has_grown(self.memory, read_memory()):
            self.freeze()

    def freeze(self, *, young: bool = False) -> None:
        """Collect among all objects, or the `young` ones alone, and freeze those that stay."""
        began = monotonic()
        gc.unfreeze()
        freed = real_collect(1 if young else 2)
        gc.freeze()
        self.frozen = True
        count = gc.get_freeze_count()
        if self.name == "synchronized":
            self.memory = read_memory()
            gc.set_threshold(*raise_oldest(self.found[1], count))
            self.left = self.found[0], gc.get_threshold()
        self.report(began, freed, f", {count} are frozen")

    def collect_now(self) -> None:
        """Collect among all objects."""
        if self.frozen:
            self.freeze()
        else:
            began = monotonic()
            self.report(began, real_collect())

    def begin_phase(self, step: int) -> None:
        """Warm up again: the leading optimizer is gone, and what is frozen may have been its model's."""
        self.began = step
        if self.active and self.frozen:
            self.release()
            self.held, self.rounds, self.left = False, 0, self.found
            began = monotonic()
            self.report(began, real_collect(), ", a new phase begins")

    def hand_over(self) -> None:
        """Leave the collector to the program for good."""
        self.active = False
        self.release()
        self.write_line("gc is the program's own: left alone")

    def release(self) -> None:
        """Undo what is still as this policy left it."""
        if gc.isenabled() == self.left[0] != self.found[0]:
            gc.enable() if self.found[0] else gc.disable()
        if gc.get_threshold() == self.left[1]:
            gc.set_threshold(*self.found[1])
        self.thaw()

    def thaw(self) -> None:
        """Unfreeze, so that the program sees all objects; the next collection in step freezes them again.

        Not at once: that would freeze garbage which has not been collected.
        """
        if self.frozen:
            self.frozen = self.shared = False
            gc.unfreeze()

    def show_all(self) -> None:
        """Unfreeze what this policy has frozen, and what was before the rank was forked."""
        self.thaw()
        if self.shared:
            self.shared = False
            gc.unfreeze()

    def reset_in_child(self) -> None:
        """Give a forked child the collector that it would have without us."""
        self.release()
        self.active = False
        restore_functions()

    def report(self, began: float, freed: int, more: str = "") -> None:
        """Count a collection, and print its line."""
        self.total += 1
        self.write_line(f"{freed} objects collected in {1e3 * (monotonic() - began):.1f} ms{more}")

    def write_line(self, text: str) -> None:
        """Print a line to stderr if LAUNCH_GC asks for it."""
        if self.rank is not None:
            try:
                os.write(2, f"launch: rank {self.rank}: step {self.step}: {text}\n".encode())
            except OSError:
                return


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

    `launcher.plan.gc_policy` has the same grammar, and a test compares the two.
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
    if now:
        policy.collect_now()
        return True
    before = policy.total
    mark_step()
    return policy.total > before


def is_capturing() -> bool:
    """Tell whether a CUDA graph is being captured, during which nothing on the GPU may be freed."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return bool(cuda is not None and cuda.is_initialized() and cuda.is_current_stream_capturing())


def is_review(rounds: int) -> bool:
    """Tell whether a collection in step, counted from 1, looks at the frozen objects, too."""
    return rounds == 1 or (rounds >= SECOND_REVIEW and rounds & (rounds - 1) == 0)


def read_memory() -> dict[str, int]:
    """Return the memory in use, in bytes: `resident` of this process, `cuda` of its tensors on its GPU.

    What cannot be read is left out.
    """
    found = {}
    try:
        with open("/proc/self/statm", "rb") as file:
            found["resident"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            found["cuda"] = int(cuda.memory_allocated())
    except Exception:
        return found
    return found


def has_grown(before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Tell whether memory of one kind has grown by more than a tenth."""
    return any(now[kind] > GROWTH * size for kind, size in before.items() if kind in now)


def raise_oldest(found: tuple[int, int, int], frozen: int) -> tuple[int, int, int]:
    """Return thresholds with which the oldest generation is collected as often as if nothing were frozen.

    CPython collects it only once the objects that have come to it are a quarter of those that it held
    (gc_collect_generations in gcmodule.c), and does not count the frozen ones among these: without this, each
    tenth collection of the middle generation would be one of the oldest. The younger generations are
    collected as before: their garbage may hold tensors of any size, so that a delay has no bound in memory.
    """
    young, middle, oldest = found
    return young, middle, max(oldest, frozen // (4 * max(1, young) * max(1, middle)))
