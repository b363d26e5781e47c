"""Forked ranks beside ranks by exec and by torchrun: CUDA, its allocator, the loss."""

import json
from collections.abc import Mapping
from typing import Any

from tests.gpu.context import NEEDED, PROGRAMS, Context, Ended

PROGRAM = str(PROGRAMS / "forked_start.py")
FRAMES = {
    "torchrun": ("agent=torchrun",),
    "exec": ("agent=direct", "start.warm=off"),
    "warm": ("agent=direct",),
}
"""Ways to start the ranks, by the words that ask for them."""
OPENING = "import torch\ntorch.zeros(1, device='cuda')\n"
"""A module that opens the GPU as it is imported."""
NOT_FORKED = "the ranks are not forked from a process with torch"
BY_ITSELF = "this program starts by itself, not from the warm process"


def run(context: Context) -> None:
    """Compare the ways, with the launcher's own settings of the allocator and with the user's."""
    for name, words in {"default": (), "segments": ("allocator.max_split_size_mb=128",)}.items():
        with context.record.part(f"settings: {name}"):
            compare_frames(context, name, words)
    if context.cpu:
        context.record.leave_out("a preload that opens the GPU", NEEDED)
        return
    with context.record.part("a preload that opens the GPU"):
        try_opening_preload(context)


def compare_frames(context: Context, name: str, words: tuple[str, ...]) -> None:
    """Run the program in each way, and compare what it found."""
    found = {}
    for frame, options in FRAMES.items():
        ended = start_program(context, f"{name} {frame}", *options, *words)
        found[frame] = read_found(ended)
        context.record.row(
            "Starts",
            settings=name,
            frame=frame,
            seconds=round(ended.seconds, 2),
            was_imported=found[frame]["was_imported"],
            device=found[frame].get("device"),
        )
    is_forked = found["warm"]["was_imported"] and not found["exec"]["was_imported"]
    context.record.check(f"{name}: the warm rank is forked", is_forked, read_refusal(context, name))
    same = {frame: compared(one) for frame, one in found.items()}
    context.record.check(
        f"{name}: the same loss, threads, device and allocator in each way",
        len({json.dumps(one, sort_keys=True) for one in same.values()}) == 1,
        json.dumps(same),
    )


def start_program(
    context: Context, name: str, *words: str, environ: Mapping[str, str] | None = None
) -> Ended:
    """Run the program with one rank; raises RuntimeError if it does not end well."""
    return context.launch(name, "nproc_per_node=1", *words, "--", PROGRAM, environ=environ).demand()


def read_found(ended: Ended) -> dict[str, Any]:
    """Return what rank 0 printed."""
    line = next(line for line in ended.read_rank().splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


def compared(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what does not depend on the way."""
    return {name: value for name, value in found.items() if name != "was_imported"}


def read_refusal(context: Context, name: str) -> str:
    """Return the line that says why the rank was not forked; empty if none does."""
    folder = context.folder / f"{name} warm"
    lines = (folder / "stderr").read_text(errors="replace").splitlines()
    lines += (folder / "run/logs/0/rank-0.err").read_text(errors="replace").splitlines()
    return "; ".join(line for line in lines if NOT_FORKED in line or BY_ITSELF in line)


def try_opening_preload(context: Context) -> None:
    """A process that has opened the GPU is not forked, and the rank runs all the same."""
    folder = context.folder / "modules"
    folder.mkdir()
    (folder / "opens_gpu.py").write_text(OPENING)
    environ = {"PYTHONPATH": str(folder)}
    ended = start_program(context, "opening", "agent=direct", "start.preload=[opens_gpu]", environ=environ)
    refused = NOT_FORKED in ended.err and not read_found(ended)["was_imported"]
    context.record.check("a process that has opened the GPU is not forked", refused, ended.err[-300:])
