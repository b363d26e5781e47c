"""How runs end on a GPU: exit codes, the first failure and its words, NCCL, and launch-rank by itself."""

import json
import sys
from collections.abc import Callable, Mapping

from tests.gpu.context import PROGRAMS, Context, Ended, run_program, together
from tests.gpu.programs.ending import STATUS

ENDING, SHOW = str(PROGRAMS / "ending.py"), str(PROGRAMS / "show_device.py")
RECORDER = {"TORCH_FR_BUFFER_SIZE": "1234", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "NCCL_DEBUG": "WARN"}
"""Variables that a user sets for the flight recorder; each has to reach the ranks as it is."""
ERRORS = {
    "assert": ("device-side assert", "index 9 is out of bounds"),
    "memory": ("CUDA out of memory", "can't allocate memory"),
}
"""Words of the error that the last lines have to show: on a GPU, and on the CPU."""


def run(context: Context) -> None:
    """Run all of them, some at the same time; not the one that takes the whole memory."""

    def attempt(part: Callable[[Context], None]) -> None:
        with context.record.part(part.__name__.replace("_", " ")):
            part(context)

    together(attempt, (try_exit, try_assert, try_collective, try_rank))
    attempt(try_memory)


def start(context: Context, ending: str, environ: Mapping[str, str] | None = None) -> Ended:
    """Run one rank that ends in a chosen way."""
    device = "cpu" if context.cpu else "cuda"
    return context.launch(ending, "nproc_per_node=1", "--", ENDING, ending, device, environ=environ)


def try_exit(context: Context) -> None:
    """The program's exit code is launch's, and the rank's line says what was applied."""
    ended = start(context, "exit")
    context.record.check("an exit code passes through", ended.code == STATUS, str(ended.code))
    said = " exited with code 7"
    context.record.check("the rank that failed is named", said in ended.err, ended.err[-300:])
    lines = [line for line in ended.err.splitlines() if "launch-rank: rank 0" in line]
    context.record.check("the shim prints its line", len(lines) == 1, ended.err[:300])
    context.record.row("The rank's line", line=lines[0] if lines else None)
    (record,) = (ended.folder / "run").glob("rank-0.applied.json")
    applied = json.loads(record.read_text())
    context.record.check("nothing failed in placing the rank", not applied.get("problems"), str(applied))


def try_assert(context: Context) -> None:
    """A device-side assert ends the run, and its error is shown."""
    judge_error(context, "assert")


def try_memory(context: Context) -> None:
    """Running out of memory ends the run, and its error is shown."""
    judge_error(context, "memory")


def judge_error(context: Context, ending: str) -> None:
    """The run fails with the rank's code, names the rank, and shows the error."""
    ended = start(context, ending)
    # A device-side assert may end the interpreter by SIGABRT.
    context.record.check(f"{ending}: a failure's exit code", ended.code in (1, 134), str(ended.code))
    context.record.check(f"{ending}: the rank is named", "launch: rank 0 on " in ended.err, ended.err[-300:])
    words = ERRORS[ending][context.cpu]
    context.record.check(f"{ending}: `{words}` is shown", words in ended.err, ended.err[-800:])


def try_collective(context: Context) -> None:
    """NCCL starts with one rank, and the variables of the flight recorder reach it."""
    ended = start(context, "collective", RECORDER).demand()
    found = json.loads(ended.read_rank().strip().splitlines()[-1])
    backend = "gloo" if context.cpu else "nccl"
    context.record.check(
        f"{backend} adds up", found["total"] == 3 * 1024 and found["backend"] == backend, str(found)
    )
    kept = {name: found["environ"].get(name) for name in RECORDER}
    context.record.check("variables of the flight recorder reach the rank", kept == RECORDER, str(kept))
    if not context.cpu:
        recorded = found["recorded"]
        context.record.check("the flight recorder has the collective", bool(recorded), f"{recorded} entries")
    context.record.row("Collective", backend=found["backend"], recorded=found["recorded"], **found["environ"])


def try_rank(context: Context) -> None:
    """launch-rank under plain torchrun, which plans by itself."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python")
    command = [sys.executable, *torchrun, "launch-rank", sys.executable, SHOW]
    ended = run_program(command, context.folder / "launch-rank", 60).demand()
    found = json.loads(ended.out.strip().splitlines()[-1])
    lines = [line for line in ended.err.splitlines() if "launch-rank: rank 0" in line]
    context.record.check("launch-rank under torchrun prints its line", len(lines) == 1, ended.err[-300:])
    context.record.row("The rank's line", line=lines[0] if lines else None)
    if not context.cpu:
        order = found["environ"]["CUDA_DEVICE_ORDER"]
        context.record.check("launch-rank shows the GPU", found["count"] > 0, str(found))
        context.record.check("launch-rank sets PCI order", order == "PCI_BUS_ID", str(order))
