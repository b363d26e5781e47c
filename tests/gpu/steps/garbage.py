"""Memory and step times of a program whose garbage holds tensors, under each collection policy."""

from collections.abc import Mapping, Sequence

from tests.benchmarks.garbage_memory import COMMANDS, DEFAULT, PROGRAMS, Run, run_program
from tests.gpu.context import NEEDED, Context

SYNCHRONIZED = "`gc=synchronized`"
COMPARED = (DEFAULT, SYNCHRONIZED)
TRIED = {"4 micro-steps, 400 evaluation batches": tuple(COMMANDS), "40 micro-steps": COMPARED}
"""Programs that are run on a GPU, by their name in the benchmark, and under which policies."""
SMALL = ("--steps=40", "--micro-steps=4", "--mb=1")
"""The program that is run on the CPU, under the policies that are compared."""
BOUND = 1.10
"""Peak of the default policy at most, of that under Python's own collector."""


def run(context: Context) -> None:
    """Run each program under its policies in turn: each has the machine to itself."""
    if context.cpu:
        run_policies(context, "small", SMALL, COMPARED)
        context.record.leave_out("the GPU's memory under each policy", NEEDED)
        return
    for name, policies in TRIED.items():
        runs = run_policies(context, name, (*PROGRAMS[name], "--device=cuda"), policies)
        if set(COMPARED) <= runs.keys():
            compare(context, name, runs[DEFAULT], runs[SYNCHRONIZED])


def run_policies(
    context: Context, name: str, words: Sequence[str], policies: Sequence[str]
) -> Mapping[str, Run]:
    """Run a program once under each policy; returns the runs that succeed."""
    runs = {}
    for policy in policies:
        with context.record.part(f"{name}, {policy}"):
            runs[policy] = run_program(context.folder, COMMANDS[policy], words)
            record_run(context, name, policy, runs[policy])
    return runs


def record_run(context: Context, name: str, policy: str, found: Run) -> None:
    """Record the figures of one run; those of a GPU, where there is one."""
    gpu = {} if context.cpu else {"allocated_MB": found.allocated_mb, "reserved_MB": found.reserved_mb}
    context.record.row(
        f"Garbage with tensors, {name}",
        policy=policy,
        median_step_ms=found.median_ms,
        resident_MB=found.peak_mb,
        **gpu,
    )
    used, where = (found.peak_mb, "resident") if context.cpu else (found.allocated_mb, "of the GPU")
    context.record.check(f"{name}, {policy}: memory is used", used > 0, f"{used:.0f} MB {where}")


def compare(context: Context, name: str, default: Run, synchronized: Run) -> None:
    """The launcher's default takes no more memory than Python's own collector."""
    for kind in ("allocated_mb", "reserved_mb"):
        found, bound = getattr(synchronized, kind), BOUND * getattr(default, kind)
        context.record.check(
            f"{name}: {kind} under {SYNCHRONIZED}", found <= bound, f"{found:.0f} over {bound:.0f}"
        )
