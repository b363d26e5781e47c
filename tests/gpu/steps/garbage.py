"""Memory and step times of a program whose garbage holds tensors, under each collection policy."""

from tests.benchmarks.garbage_memory import COMMANDS, DEFAULT, PROGRAMS, Run, run_program
from tests.gpu.context import Context

SYNCHRONIZED = "`gc=synchronized`"
TRIED = ("4 micro-steps, 400 evaluation batches", "40 micro-steps")
"""Programs, by their name in the benchmark, that are run on a GPU."""
SMALL = ("--steps=40", "--micro-steps=4", "--mb=1")
"""The program that is run on the CPU."""
BOUND = 1.10
"""Peak of the default policy at most, of that under Python's own collector."""


def run(context: Context) -> None:
    """Run each program under each policy in turn: each has the machine to itself."""
    programs = (
        {"small": SMALL} if context.cpu else {name: (*PROGRAMS[name], "--device=cuda") for name in TRIED}
    )
    for name, words in programs.items():
        runs: dict[str, Run] = {}
        for policy, command in COMMANDS.items():
            with context.record.part(f"{name}, {policy}"):
                runs[policy] = run_program(context.folder, command, words)
                record_run(context, name, policy, runs[policy])
        if not context.cpu and {DEFAULT, SYNCHRONIZED} <= runs.keys():
            compare(context, name, runs[DEFAULT], runs[SYNCHRONIZED])


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
    context.record.check(f"{name}, {policy}: a GPU is used", context.cpu or found.allocated_mb > 0)


def compare(context: Context, name: str, default: Run, synchronized: Run) -> None:
    """The launcher's default takes no more memory than Python's own collector."""
    for kind in ("allocated_mb", "reserved_mb"):
        found, bound = getattr(synchronized, kind), BOUND * getattr(default, kind)
        context.record.check(
            f"{name}: {kind} under {SYNCHRONIZED}", found <= bound, f"{found:.0f} over {bound:.0f}"
        )
