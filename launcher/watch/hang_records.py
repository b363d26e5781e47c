"""`hang-N/` in the run directory: the verdict, what each node has gathered, and all stacks as text."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from launcher.watch.node_reports import encode_value, write_hang_file
from launcher.watch.watch_model import Hang, NodeEvidence, ProcessState, RankEvidence


def write_hang(run_path: Path, hang: Hang, evidence: Sequence[NodeEvidence]) -> None:
    """Write all that is known of a hang; raises OSError."""
    write_verdict(run_path, hang)
    for node in evidence:
        own = replace(node, number=hang.number)
        write_hang_file(run_path, hang.number, f"evidence-{node.host}.json", encode_value(own))
        for rank in node.ranks:
            name = f"stacks-{node.host}-rank-{rank.rank}.txt"
            write_hang_file(run_path, hang.number, name, describe_stacks(rank).encode("utf-8", "replace"))


def write_verdict(run_path: Path, hang: Hang) -> None:
    """Write a hang's verdict, or what has become of it; raises OSError."""
    text = json.dumps(asdict(hang), indent=1, allow_nan=False) + "\n"
    write_hang_file(run_path, hang.number, "verdict.json", text.encode())


def describe_stacks(rank: RankEvidence) -> str:
    """Return a rank's stacks, and those of its children, as text."""
    where = f"rank {rank.rank} on {rank.host}, {rank.phase}, step {rank.step}"
    lines = [f"{where}, {rank.idle:.0f} s without progress", *list_process(rank.process, "process")]
    for child in rank.children:
        lines += ["", *list_process(child, "child")]
    lines += [f"note: {note}" for note in rank.notes]
    return "\n".join(lines) + "\n"


def list_process(process: ProcessState, what: str) -> Iterator[str]:
    """Give the lines of one process."""
    state = f"state {process.state}"
    inside = f", in {process.system_call or process.wait_channel}" if process.state in "SD" else ""
    yield f"{what} {process.pid} {process.command}".rstrip() + f": {state}{inside.removesuffix(', in ')}"
    for stack in process.stacks:
        main = " (main)" if stack.is_current else ""
        yield f"  thread {stack.thread}{main}, innermost first:"
        for frame in stack.frames:
            yield f"    {frame.file}:{frame.line} in {frame.function}"
