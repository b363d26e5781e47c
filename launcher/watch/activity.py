"""What a rank does, in words, from its stacks and the kernel's word: pure.

`it sleeps at data.py:88, read_shard`: the verb is from the kernel (state, system call, wait channel), the
place is the innermost line of the main thread in the program's own code.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from launcher.watch.model import Frame, ProcessState, RankEvidence
from launcher.watch.procfs import WAITS

_STANDARD_LIBRARY = re.compile(r"/lib(64)?/python\d[\d.]*t?/|^<frozen |^<eval_with_key>|\bpython\d+\.zip/")
"""Python's files, and torch.fx's code; `<string>` and `<stdin>` are programs."""
_INSTALLED = re.compile(r"/(site|dist)-packages/")
_TORCH = re.compile(r"/torch/(?:distributed|nn|utils|optim|autograd|_\w+|[a-z_]+\.py)\b|/triton/")
"""torch's files wherever they are, also in a checkout of its sources."""
_HOOK = re.compile(r"/launch_inprocess/|/sitecustomize\.py$")
_BUNDLED = re.compile(r"/launcher/programs/")
"""The bundled training program is a program, wherever it is installed."""
_DEBUGGER = re.compile(r"/(pdb|bdb)\.py$|/(debugpy|pydevd|_pydevd_bundle|ipdb|pudb|IPython)/")
_COMPILER = re.compile(r"/torch/(_dynamo|_inductor|_functorch|export)/|/triton/compiler/")
_SAVING = re.compile(r"/torch/serialization\.py$|/torch/distributed/checkpoint/|/safetensors/")
_SAVING_FUNCTIONS = ("save", "async_save", "_save", "save_file", "_legacy_save", "fsync_future")
_DATALOADER = re.compile(r"/torch/utils/data/dataloader\.py$")
_WAITING_FOR_DATA = ("_try_get_data", "_get_data", "_next_data")
_WORKER_LOOP = re.compile(r"/torch/utils/data/_utils/worker\.py$")
_DISTRIBUTED = re.compile(r"/torch/distributed/(distributed_c10d|rendezvous|_functional_collectives)\.py$")
"""Where programs wait for other ranks; checkpoints and FSDP have folders of their own there."""
_DISTRIBUTED_WRAPPERS = ("wrapper", "_wrapper", "func_wrapper", "inner", "_fn")
_AUTOGRAD = re.compile(r"/torch/autograd/graph\.py$")
_JOIN_FUNCTIONS = ("join", "_wait_for_tstate_lock")
_LOCK_FUNCTIONS = (*_JOIN_FUNCTIONS, "acquire", "wait", "__enter__", "wait_for")
_WORKING_CPU = 0.1
"""Cores from which on a process counts as working; one that waits uses less than 0.02."""
COMPUTING = 0.5
"""Cores from which on it computes, whatever state a look has found."""
_UNSPECIFIC = ("stands", "waits for a lock", "waits for input", "waits for the network")
"""Verbs that a call of `torch.distributed` says more than."""
_STATES = {"Z": "has ended", "X": "has ended", "T": "is stopped (SIGSTOP)", "R": "computes"}
WORKING_IO = 1 << 16
"""Bytes a look from which on it counts as working."""
_CALLS = {name: row["says"] for name, row in WAITS["call"].items() if "says" in row}
"""What a system call that does not return means."""
_CHANNELS: Mapping[str, str] = WAITS["channel"]


def _is_library(frame: Frame) -> bool:
    """Tell whether a line is not the program's own: torch's, a package's, Python's, the hook's."""
    patterns = (_STANDARD_LIBRARY, _INSTALLED, _TORCH, _HOOK)
    return not _BUNDLED.search(frame.file) and any(pattern.search(frame.file) for pattern in patterns)


def find_place(process: ProcessState) -> Frame | None:
    """Return the innermost line of the main thread in the program's own code.

    If it has none there, as with a program that is installed itself: in another package than torch; else
    the innermost line of all.
    """
    stack = process.main_stack
    if stack is None:
        return None
    own = (frame for frame in stack.frames if not _is_library(frame))
    installed = (
        frame
        for frame in stack.frames
        if _INSTALLED.search(frame.file) and not _TORCH.search(frame.file) and not _HOOK.search(frame.file)
    )
    return next(own, None) or next(installed, None) or stack.frames[0]


def _show_place(frame: Frame | None) -> str:
    """Return ` at data.py:88, read_shard`, or an empty text."""
    return f" at {PurePath(frame.file).name}:{frame.line}, {frame.function}" if frame else ""


def _list_library_frames(process: ProcessState) -> Sequence[Frame]:
    """Return the lines of the main thread within the innermost one of the program's own code."""
    frames = process.main_stack.frames if process.main_stack else ()
    own = next((number for number, frame in enumerate(frames) if not _is_library(frame)), None)
    return frames[:own]


def find_distributed_call(process: ProcessState) -> str:
    """Return the function of `torch.distributed` that the main thread is in: `barrier`; empty for none.

    It is the outermost one that the program's own code has called, without decorators' wrappers.
    """
    inside = [
        frame.function
        for frame in _list_library_frames(process)
        if _DISTRIBUTED.search(frame.file) and frame.function not in _DISTRIBUTED_WRAPPERS
    ]
    return inside[-1] if inside else ""


def is_in_backward(process: ProcessState) -> bool:
    """Tell whether the main thread is in autograd's engine, in which DDP waits for its buckets."""
    frames = _list_library_frames(process)
    return bool(frames) and _AUTOGRAD.search(frames[0].file) is not None


def find_phase(rank: RankEvidence) -> str:
    """Return a rank's phase: by its stack if it compiles, saves or loads there, else by its heartbeat."""
    inside = _list_library_frames(rank.process)
    if any(_COMPILER.search(frame.file) for frame in inside):
        return "compiling"
    if any(_SAVING.search(frame.file) and frame.function in _SAVING_FUNCTIONS for frame in inside):
        return "saving"
    return "loading" if _waits_for_data(rank.process) else rank.phase


def _waits_for_data(process: ProcessState) -> bool:
    """Tell whether the main thread waits for a DataLoader's workers."""
    return any(
        _DATALOADER.search(frame.file) and frame.function in _WAITING_FOR_DATA
        for frame in _list_library_frames(process)
    )


def is_debugged(rank: RankEvidence) -> bool:
    """Tell whether a debugger holds a rank: one that traces it, or one in its interpreter."""
    frames = rank.process.main_stack.frames if rank.process.main_stack else ()
    return rank.process.tracer > 0 or any(_DEBUGGER.search(frame.file) for frame in frames)


def is_working(rank: RankEvidence) -> bool:
    """Tell whether a rank or one of its children used CPU or IO, or went on, while evidence was gathered.

    If that was not seen whole, it did.
    """
    return (
        not rank.is_measured
        or rank.process.stack_changes
        or any(
            process.cpu >= _WORKING_CPU or process.io_bytes >= WORKING_IO or process.state == "R"
            for process in (rank.process, *rank.children)
        )
    )


def is_deadlocked(rank: RankEvidence) -> bool:
    """Tell whether all Python threads of a rank wait for locks, or for the end of such a thread.

    Then nobody is left who releases one.
    """
    if rank.process.system_call not in ("", "futex") or is_working(rank):
        return False
    is_main_waiting = False
    for stack in rank.process.stacks:
        first = stack.frames[0] if stack.frames else None
        if first and stack.awaits_lock:
            is_main_waiting |= stack.is_current
        elif first and not (first.file.endswith("/threading.py") and first.function in _JOIN_FUNCTIONS):
            return False
    return is_main_waiting


def stands_by_itself(rank: RankEvidence) -> bool:
    """Tell whether the main thread does something of its own rather than wait in `torch.distributed`."""
    if find_distributed_call(rank.process) or is_in_backward(rank.process):
        return False
    return describe_process(rank.process) not in ("stands", "waits for a lock") or _is_in_lock(rank.process)


def _is_in_lock(process: ProcessState) -> bool:
    """Tell whether the main thread waits in Python's `threading`."""
    first = process.main_stack.frames[0] if process.main_stack else None
    return bool(first and first.file.endswith("/threading.py") and first.function in _LOCK_FUNCTIONS)


def describe_process(process: ProcessState) -> str:
    """Return what a process does as a verb: `sleeps`, `reads a file`, `computes`, `stands`."""
    if process.state == "t" or process.tracer:
        return f"is held by a debugger (PID {process.tracer})"
    if process.state in _STATES:
        return _STATES[process.state]
    if process.cpu >= COMPUTING:
        return "computes"
    if _is_in_lock(process):
        return "waits for a lock"
    said = _CHANNELS.get(process.wait_channel) or _CALLS.get(process.system_call)
    if process.state == "D" and process.wait_channel not in _CHANNELS:
        where = f", {process.wait_channel}" if process.wait_channel else ""
        return f"{said or 'waits for a disk or a device'} (state D{where})"
    return said or "stands"


def describe_activity(rank: RankEvidence, *, is_waiting: bool = False) -> tuple[str, Frame | None]:
    """Return what a rank does and where, as a sentence without its subject, and the line.

    `is_waiting`: it waits for other ranks, which the kernel's word for that cannot tell.
    """
    process = rank.process
    place = find_place(process)
    shown, doing = _show_place(place), describe_process(process)
    if process.state not in "TtZX" and _waits_for_data(process):
        if worker := _find_stuck_worker(rank.children):
            inner = find_place(worker)
            text = f"which {describe_process(worker)}{_show_place(inner)}"
            return f"waits for DataLoader worker {worker.pid}, {text}", inner or place
        which = "its DataLoader workers" if rank.children else "a DataLoader worker that is gone"
        return f"waits for {which}{shown}", place
    if is_debugged(rank) and not process.tracer:
        return f"is in a debugger{shown}", place
    if doing in _UNSPECIFIC:
        if operation := find_distributed_call(process):
            return f"waits in {operation}{shown}", place
        if is_waiting and not _is_in_lock(process):
            return f"waits{shown}", place
    if rank.phase == "ended" and process.state not in "TZX":
        return f"is about to exit and {doing}{shown}", place
    return f"{doing}{shown}", place


def _find_stuck_worker(children: Sequence[ProcessState]) -> ProcessState | None:
    """Return the worker that has not answered: one that has ended or is stopped, else one in a dataset.

    A worker without work waits for its queue in torch's loop, which has no line of the program's own.
    """
    for is_stuck in (
        lambda child: child.state in "ZX",
        lambda child: child.state in "Tt",
        lambda child: child.state == "D",
        _is_in_dataset,
        lambda child: not child.stacks and describe_process(child) == "sleeps",
    ):
        if found := next(filter(is_stuck, children), None):
            return found
    return None


def _is_in_dataset(process: ProcessState) -> bool:
    """Tell whether a DataLoader worker fetches an item, rather than wait for one to fetch."""
    for frame in process.main_stack.frames if process.main_stack else ():
        if _WORKER_LOOP.search(frame.file):
            return False
        if not _is_library(frame) or "/torch/utils/data/_utils/fetch.py" in frame.file:
            return True
    return False
