"""Settings of the CUDA allocator: what this torch takes and refuses, against the launcher's table."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from launcher.config.allocator_options import parse_version
from launcher.plan.allocator_keys import KNOWN, Version, find_fault, list_known_keys
from launcher.plan.environment import ALLOCATOR_VARIABLES
from tests.gpu.context import NEEDED, PROGRAMS, Context, Ended, run_program, together
from tests.plan.allocator_values import CORE, LAX, RIGHT, WRONG

FIRST_USE = str(PROGRAMS / "first_use.py")
RUNTIME = ("backend",)
"""Settings that cannot be changed once torch is imported."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Settings in the environment of a process that uses CUDA."""

    name: str
    environ: Mapping[str, str]
    taken: bool | None
    """Whether they have to be taken; None where that is only to be known."""


def run(context: Context) -> None:
    """Ask torch's parser for all values, then CUDA's first use for one or two of each setting."""
    version = parse_version(torch.__version__)
    with context.record.part("the parser"):
        ask_parser(context, version)
    if context.cpu:
        context.record.leave_out("settings at CUDA's first use", NEEDED)
        return
    together(lambda one: try_settings(context, one), [*list_attempts(version), *list_names(version)])


def ask_parser(context: Context, version: Version | None) -> None:
    """Set each value in this process; torch's parser needs no GPU for that."""
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is None:
        context.record.leave_out("the parser", f"torch {torch.__version__} has no function for it")
        return
    known = [name for name in list_known_keys(version) if torch.version.cuda or name in CORE]
    for name in (name for name in known if name not in RUNTIME):
        differ = []
        values = [value for value in (*RIGHT[KNOWN[name].kind], *WRONG[KNOWN[name].kind]) if value.strip()]
        for value in values:
            taken, ours = accepts(set_settings, f"{name}:{value}"), is_right(name, value, version)
            if taken != ours and not (taken and value in LAX):
                differ.append(f"{value}: torch {taken}, we {ours}")
        context.record.check(f"the parser, {name}: {len(values)} values", not differ, "; ".join(differ))
    if torch.version.cuda:
        context.record.check(
            "the parser refuses a name that is none", not accepts(set_settings, "no_such_key:1")
        )


def accepts(set_settings: Callable[[str], None], text: str) -> bool:
    """Whether torch's parser takes a text; the size on which other settings depend is restored."""
    try:
        set_settings(text)
    except (ValueError, RuntimeError, IndexError):
        return False
    finally:
        set_settings("large_segment_size_mb:20")
    return True


def is_right(name: str, value: str, version: Version | None) -> bool:
    """Whether the launcher takes a value."""
    return not find_fault(name, {name: value}, version)


def list_attempts(version: Version | None) -> Iterator[Attempt]:
    """For each setting a right value and a wrong one; names that this torch does not know."""
    variable = ALLOCATOR_VARIABLES[0]
    for name in list_known_keys(version):
        kind = KNOWN[name].kind
        # A share of 0 leaves no memory to use.
        first = RIGHT[kind][-1:] if kind == "share" else RIGHT[kind][:1]
        right = RIGHT[kind] if name in RUNTIME else first
        wrong = next(value for value in WRONG[kind] if value.strip() == value != "" and value not in LAX)
        for value in right:
            yield Attempt(f"{name}:{value}", {variable: f"{name}:{value}"}, taken=True)
        yield Attempt(f"{name}:{wrong}", {variable: f"{name}:{wrong}"}, taken=False)
    for name in ("no_such_key", *(key for key in KNOWN if key not in list_known_keys(version))):
        yield Attempt(f"{name}, unknown to this torch", {variable: f"{name}:1"}, taken=False)
    both = "expandable_segments:True,max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2,>:8]"
    yield Attempt("several together", {variable: both, ALLOCATOR_VARIABLES[2]: both}, taken=True)


def list_names(version: Version | None) -> Iterator[Attempt]:
    """Which variables torch hears: a wrong setting in one that is not heard is none."""
    wrong, right = "no_such_key:1", "expandable_segments:True"
    heard = version is None or version >= (2, 10)
    yield Attempt(f"{ALLOCATOR_VARIABLES[2]} is heard", {ALLOCATOR_VARIABLES[2]: wrong}, taken=not heard)
    yield Attempt(
        f"{ALLOCATOR_VARIABLES[0]} comes before {ALLOCATOR_VARIABLES[2]}",
        {ALLOCATOR_VARIABLES[0]: right, ALLOCATOR_VARIABLES[2]: wrong},
        taken=True,
    )
    yield Attempt(f"{ALLOCATOR_VARIABLES[1]} is heard", {ALLOCATOR_VARIABLES[1]: wrong}, taken=None)


def try_settings(context: Context, attempt: Attempt) -> None:
    """Use CUDA under the settings, in a process of its own."""
    with context.record.part(attempt.name):
        folder = context.folder / attempt.name
        judge(context, attempt, run_program([sys.executable, FIRST_USE], folder, 60, attempt.environ))


def judge(context: Context, attempt: Attempt, ended: Ended) -> None:
    """Compare, and keep torch's words where it refuses."""
    said = ended.err.strip().splitlines()[-1] if ended.code and ended.err.strip() else ended.out.strip()
    if attempt.taken is not None:
        held = (ended.code == 0) == attempt.taken
        context.record.check(attempt.name, held, f"exit code {ended.code}: {said}")
    if attempt.taken is None or ended.code:
        context.record.row(
            "Settings at CUDA's first use", settings=attempt.name, exit_code=ended.code, torch=said
        )
