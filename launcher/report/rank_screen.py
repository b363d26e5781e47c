"""One rank on the screen of `launch watch`: its figures, its placement, its stack and its last lines."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from launcher.report.tables import shorten_age
from launcher.report.watch_columns import COLUMNS, WARN, Row
from launcher.report.watch_lines import pack_parts, wrap_text
from launcher.text import clean_text, strip_sequences
from launcher.watch.rank_details import ProcessSnapshot, RankDetails
from launcher.watch.watch_model import Frame, GpuSample, ProcessState, Stack

LONGEST = 2000
"""Characters of a line."""
APART = ("rank", "node", "phase", "last", "mem", "power", "clock")
"""Columns that the heading and the GPU's line have."""
STATES = {
    "R": "is running",
    "S": "sleeps",
    "D": "waits for the disk or a device, and takes no signal",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "is gone",
}
"""States of proc(5) in words."""


def render_rank(row: Row, details: RankDetails | None, width: int, height: int) -> list[Text]:
    """Return the lines of a rank; the stack and its output share what is left of the height."""
    lines = [*list_heading(row, width), *list_placement(details, width)]
    if details is None:
        return lines[:height]
    left = max(2, height - len(lines))
    stack = list(list_snapshot(details.snapshot, width))
    output = list(list_output(details, width))
    room = left - min(len(output), max(2, left // 3))
    if len(stack) > room:
        stack = [*stack[: room - 1], Text(f"  … {len(stack) - room + 1} more lines", "dim")]
    title, *rest = output
    return [*lines, *stack, title, *rest[len(rest) - max(0, min(len(rest), left - len(stack) - 1)) :]]


def list_heading(row: Row, width: int) -> list[Text]:
    """Return which rank it is, what it does, and its figures."""
    (rank,) = row.ranks
    cells = {column.title: cell for column in COLUMNS if (cell := column.read(row))}
    parts = [
        Text(f"rank {rank.rank} on {clean_text(row.host)}", "bold"),
        Text(f"local rank {rank.local_rank}"),
        Text(f"PID {rank.pid}"),
        Text(cells["phase"].text, cells["phase"].style),
    ]
    if last := cells.get("last"):
        parts.append(Text(f"last step {last.text} ago", last.style))
    figures = [
        Text.assemble((f"{title} ", "dim"), (cell.text, cell.style))
        for title, cell in cells.items()
        if title not in APART
    ]
    lines = [*pack_parts(parts, width), *pack_parts(figures, width)]
    if rank.gpu:
        lines += pack_parts([Text(text) for text in describe_gpu_sample(rank.gpu)], width)
    for note in rank.notes:
        lines += wrap_text(f"note: {clean_text(note, LONGEST)}", "dim", width)
    return lines


def describe_gpu_sample(gpu: GpuSample) -> Iterator[str]:
    """Give its figures together with their limits."""
    if gpu.power is not None:
        yield f"power {gpu.power:.0f}{f' of {gpu.power_limit:.0f}' if gpu.power_limit else ''} W"
    if gpu.sm_clock is not None:
        yield f"clock {gpu.sm_clock}{f' of {gpu.max_sm_clock}' if gpu.max_sm_clock else ''} MHz"
    if gpu.memory_used is not None and gpu.memory_total:
        yield f"memory {gpu.memory_used / 2**30:.1f} of {gpu.memory_total / 2**30:.1f} GiB"
    if gpu.pcie_width is not None and gpu.max_pcie_width:
        yield f"PCIe x{gpu.pcie_width} of x{gpu.max_pcie_width}"
    if gpu.pcie_replays:
        yield f"{gpu.pcie_replays} PCIe replays"


def list_placement(details: RankDetails | None, width: int) -> list[Text]:
    """Return what the rank has, and where that is not as planned."""
    if details is None:
        return []
    lines = []
    if details.placement:
        as_planned = "" if details.differences else ", as planned"
        lines += wrap_text(f"placement: {clean_text(details.placement, LONGEST)}{as_planned}", "", width)
    for difference in details.differences:
        lines += wrap_text(clean_text(difference, LONGEST), WARN, width)
    return lines


def list_snapshot(snapshot: ProcessSnapshot | None, width: int) -> Iterator[Text]:
    """Give the stacks of the rank's threads, the main one first, and when they were taken."""
    if snapshot is None:
        yield Text("stack: none was taken yet (t asks the node for one)", "dim")
        return
    process = snapshot.process
    when = f"stack {shorten_age(snapshot.age)} ago ({snapshot.origin})"
    yield from wrap_text(f"{when}: {describe_process_state(process)}", "", width)
    for stack in sorted(process.stacks, key=lambda one: not one.is_current):
        yield from list_frames(stack, width, only=len(process.stacks) == 1)


def describe_process_state(process: ProcessState) -> str:
    """Say what the kernel tells of a process."""
    words = [f"it {STATES.get(process.state, 'is in state ' + clean_text(process.state))}"]
    words += [f"in {clean_text(process.wait_channel)}"] if process.wait_channel not in ("", "0") else []
    words += [f"(system call {clean_text(process.system_call)})"] if process.system_call else []
    words += [f"and is traced by process {process.tracer}"] if process.tracer else []
    return " ".join(words)


def list_frames(stack: Stack, width: int, *, only: bool) -> Iterator[Text]:
    """Give one thread's frames, innermost first."""
    if not only:
        name = "main thread" if stack.is_current else f"thread {clean_text(stack.thread)}"
        yield Text(f"  {name}", "dim")
    for frame in stack.frames:
        yield cut(f"  {describe_frame(frame, width - 2)}", width)


def describe_frame(frame: Frame, width: int) -> str:
    """Return a line of a stack: `data.py:88, read_shard`; of a long path the end."""
    text = f"{clean_text(frame.file, LONGEST)}:{frame.line}, {clean_text(frame.function)}"
    return text if len(text) <= width else f"...{text[3 - width :]}"


def list_output(details: RankDetails, width: int) -> Iterator[Text]:
    """Give the rank's last lines."""
    if not details.lines:
        yield Text("it has printed nothing", "dim")
        return
    yield Text(f"last lines (std{details.stream})", "dim")
    for line in details.lines:
        yield cut(clean_line(line), width)


def clean_line(line: str) -> str:
    """Return a line of a program's without what a terminal acts on; its spaces stay."""
    text = strip_sequences(line.expandtabs())
    return "".join(char if char.isprintable() else "?" for char in text[:LONGEST])


def cut(text: str, width: int, style: str = "") -> Text:
    """Return a text that fits a line."""
    found = Text(text, style)
    found.truncate(width, overflow="ellipsis")
    return found


def render_help(width: int, keys: Sequence[tuple[str, str]]) -> list[Text]:
    """Return what keys do, and what the columns mean."""
    lines = [Text("keys", "bold")]
    lines += [cut(f"  {key:<16}{meaning}", width) for key, meaning in keys]
    lines += [cut("columns, and the letters that sort by them", width, "bold")]
    shown = [f"  {column.letter} {column.title:<9} {column.meaning}" for column in COLUMNS]
    return lines + [cut(line, width) for line in shown]
