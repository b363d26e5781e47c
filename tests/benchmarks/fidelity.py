"""Whether programs run under each agent as they do by themselves: what they write, and how they end.

`python -m tests.benchmarks fidelity [case=PART+PART…] [frame=PART+…]`: each program of `tests/user_programs`
is run as plain processes with the variables of torch.distributed, which the others are compared with; by
torchrun; and by `launch` with each way to start ranks.
"""

import sys
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path

from tests.benchmarks.fidelity_frames import FRAMES, Case, Ran, copy_programs, run_alone

BUNDLED = (
    "python",
    "-m",
    "launcher.programs.train",
    "--model.layers=2",
    "--model.hidden_size=32",
    "--model.intermediate_size=64",
    "--model.max_seq_len=32",
    "--batch-size=4",
    "--log-every=1",
    "--num-workers=0",
    "--eval-batches=2",
    "--peak-tflops=0.1",
    "--steps=6",
)
ENDINGS = (
    "exit-code",
    "exit-message",
    "exit-none",
    "exit-large",
    "uncaught",
    "group",
    "hook",
    "interrupt",
    "sigint",
    "sigterm",
    "sigkill",
    "segv",
    "abort",
    "os-exit",
    "thread",
    "late-thread",
    "atexit",
    "noisy",
    "warn",
    "asyncio",
    "handlers",
    "closed",
    "re-exec",
)
TRAINING = ("ddp", "fsdp", "compile", "hf", "lightning", "accelerate")
CASES = (
    Case("the interpreter", ("interpreter.py", "a", "--b=c", "")),
    Case("the interpreter, -m", ("python", "-m", "interpreter", "a")),
    Case("the interpreter, options", ("python", "-O", "-u", "-W", "ignore::ImportWarning", "interpreter.py")),
    Case("the interpreter, a folder", ("python", "folder", "a")),
    Case(
        "the interpreter, PYTHONHASHSEED",
        ("interpreter.py",),
        environ={"PYTHONHASHSEED": "3", "PYTHONPATH": "pkg"},
    ),
    Case(
        "the interpreter, C locale",
        ("interpreter.py",),
        environ={"LC_ALL": "C", "PYTHONIOENCODING": "latin-1:replace"},
    ),
    Case("python -m package", ("python", "-m", "pkg", "a")),
    Case("python -m package, fails", ("python", "-m", "pkg", "--fail")),
    Case(
        "python -c", ("python", "-c", "import sys, torch; print(sys.argv, __name__, sys.path[0]); f()", "a")
    ),
    Case("no such module", ("python", "-m", "nowhere")),
    Case("a syntax error", ("broken.py",)),
    Case("a user's module named launcher", ("own_launcher.py",)),
    *(Case(f"ends by {way}", ("endings.py", way)) for way in ENDINGS),
    Case("stdin", ("endings.py", "stdin"), stdin="one\ntwo\n"),
    Case("pdb", ("endings.py", "pdb"), stdin="w\np number\nnumber += 1\nc\n"),
    Case("breakpoint()", ("endings.py", "breakpoint"), stdin="p number\nc\n"),
    Case("python -m pdb", ("python", "-m", "pdb", "endings.py", "exit-code"), stdin="b fail\nc\nq\n"),
    Case("processes", ("children.py",)),
    Case("profilers", ("tools.py",)),
    Case("python -m cProfile", ("python", "-m", "cProfile", "-o", "/dev/null", "endings.py", "exit-none")),
    *(Case(f"trains by {way}", ("training.py", way), ranks=2) for way in TRAINING),
    Case("trains by hf, preloaded", ("training.py", "hf"), ranks=2, preload="transformers"),
    Case("trains by lightning, preloaded", ("training.py", "lightning"), ranks=2, preload="lightning"),
    Case("the bundled program", BUNDLED, ranks=2),
)
"""Programs, each with one way to run."""


def bench_fidelity(folder: Path, options: Mapping[str, str]) -> None:
    """Print for each program whether it ran as by itself, and what was different."""
    work = copy_programs(folder)
    (work / "folder").mkdir()
    (work / "folder" / "__main__.py").write_text((work / "interpreter.py").read_text())
    (work / "broken.py").write_text("import torch\nprint('never'\n")
    cases = [case for case in CASES if matches(case.name, options.get("case", ""))]
    frames = [name for name in FRAMES if matches(name, options.get("frame", ""))]
    print(f"\n| program | {' | '.join(frames)} |\n|---|{'---|' * len(frames)}")
    for case in cases:
        alone = run_alone(case, work)
        cells = []
        for name in frames:
            ran = FRAMES[name](case, work)
            found = describe_difference(alone, ran)
            cells.append("differs" if found else "the same" + name_start(name, ran))
            if found:
                print(f"\n## {case.name}, {name}\n{found}\n{show_notices(ran)}", file=sys.stderr)
        print(f"| {case.name} | {' | '.join(cells)} |", flush=True)


def show_notices(ran: Ran) -> str:
    """Return the lines of the launcher's that tell of something."""
    lines = [line for line in ran.said.splitlines() if line.startswith("launch")]
    return "\n".join(line[:300] for line in lines if ", cpus " not in line)


def matches(name: str, wanted: str) -> bool:
    """Tell whether a name is among those that are asked for, `part+part`."""
    return not wanted or any(part in name for part in wanted.split("+"))


def name_start(frame: str, ran: Ran) -> str:
    """Say whether ranks that might have been forked were not."""
    notices = ("not from the warm process", "not forked from a process with torch")
    return ", by exec" if "warm" in frame and any(notice in ran.said for notice in notices) else ""


def describe_difference(alone: Ran, ran: Ran) -> str:
    """Return what is different, as a diff; empty if nothing is."""
    found = [] if alone.code == ran.code else [f"exit code {ran.code}, by itself {alone.code}"]
    if len(ran.texts) != len(alone.texts):
        return "\n".join([*found, f"{len(ran.texts)} files of output"])
    for number, (before, after) in enumerate(zip(alone.texts, ran.texts, strict=True)):
        if before != after:
            kind = "stdout" if number < len(alone.texts) // 2 else "stderr"
            lines = unified_diff(
                before.splitlines(), after.splitlines(), f"{kind} by itself", kind, n=0, lineterm=""
            )
            found += [line[:600] for line in lines]
    return "\n".join(found)
