"""What a rank does, in words, from its stacks and the kernel's word: pure.

`it sleeps at data.py:88, read_shard`: the verb is from the kernel (state, system call, wait channel), the
place is the innermost line of the main thread in the program's own code.
"""

import re
from collections.abc import Sequence
from pathlib import PurePath

from launcher.watch.watch_model import Frame, ProcessState, RankEvidence, Stack

STANDARD_LIBRARY = re.compile(r"/lib(64)?/python\d[\d.]*t?/|^<frozen |^<eval_with_key>|\bpython\d+\.zip/")
"""Python's files, and torch.fx's code; `<string>` and `<stdin>` are programs."""
INSTALLED = re.compile(r"/(site|dist)-packages/")
TORCH = re.compile(r"/torch/(?:distributed|nn|utils|optim|autograd|_\w+|[a-z_]+\.py)\b|/triton/")
"""torch's files wherever they are, also in a checkout of its sources."""
HOOK = re.compile(r"/launch_inprocess/|/sitecustomize\.py$")
BUNDLED = re.compile(r"/launcher/programs/")
"""The bundled training program is a program, wherever it is installed."""
DEBUGGER = re.compile(r"/(pdb|bdb)\.py$|/(debugpy|pydevd|_pydevd_bundle|ipdb|pudb|IPython)/")
COMPILER = re.compile(r"/torch/(_dynamo|_inductor|_functorch|export)/|/triton/compiler/")
SAVING = re.compile(r"/torch/serialization\.py$|/torch/distributed/checkpoint/|/safetensors/")
SAVING_FUNCTIONS = ("save", "async_save", "_save", "save_file", "_legacy_save", "fsync_future")
DATALOADER = re.compile(r"/torch/utils/data/dataloader\.py$")
WAITING_FOR_DATA = ("_try_get_data", "_get_data", "_next_data")
WORKER_LOOP = re.compile(r"/torch/utils/data/_utils/worker\.py$")
DISTRIBUTED = re.compile(r"/torch/distributed/(distributed_c10d|rendezvous|_functional_collectives)\.py$")
"""Where programs wait for other ranks; checkpoints and FSDP have folders of their own there."""
DISTRIBUTED_WRAPPERS = ("wrapper", "_wrapper", "func_wrapper", "inner", "_fn")
AUTOGRAD = re.compile(r"/torch/autograd/graph\.py$")
LOCK_FUNCTIONS = ("acquire", "wait", "join", "_wait_for_tstate_lock", "__enter__", "wait_for")
WORKING_CPU = 0.1
"""Cores from which on a process counts as working; one that waits uses less than 0.02."""
COMPUTING = 0.5
"""Cores from which on it computes, whatever state a look has found."""
UNSPECIFIC = ("stands", "waits for a lock", "waits for input", "waits for the network")
"""Verbs that a call of `torch.distributed` says more than."""
STATES = {"Z": "has ended", "X": "has ended", "T": "is stopped (SIGSTOP)", "R": "computes"}
WORKING_IO = 1 << 16
"""Bytes a look from which on it counts as working."""
CALLS = {
    "nanosleep": "sleeps",
    "clock_nanosleep": "sleeps",
    "pause": "waits for a signal",
    "rt_sigtimedwait": "waits for a signal",
    "read": "reads a file",
    "readv": "reads a file",
    "pread64": "reads a file",
    "open": "opens a file",
    "openat": "opens a file",
    "getdents64": "lists a directory",
    "newfstatat": "looks at a file",
    "statx": "looks at a file",
    "write": "writes a file",
    "writev": "writes a file",
    "pwrite64": "writes a file",
    "fsync": "waits for the disk (fsync)",
    "fdatasync": "waits for the disk (fdatasync)",
    "msync": "waits for the disk (msync)",
    "flock": "waits for a file's lock",
    "fcntl": "waits for a file's lock",
    "futex": "waits for a lock",
    "poll": "waits for input",
    "ppoll": "waits for input",
    "select": "waits for input",
    "pselect6": "waits for input",
    "epoll_wait": "waits for input",
    "epoll_pwait": "waits for input",
    "recvfrom": "waits for the network",
    "recvmsg": "waits for the network",
    "sendto": "sends over the network",
    "sendmsg": "sends over the network",
    "connect": "connects over the network",
    "accept": "waits for a connection",
    "accept4": "waits for a connection",
    "wait4": "waits for another process",
    "waitid": "waits for another process",
}
"""What a system call that does not return means."""
CHANNELS = {
    "hrtimer_nanosleep": "sleeps",
    "do_nanosleep": "sleeps",
    "wait_for_partner": "opens a FIFO that nobody has opened at its other end",
    "fifo_open": "opens a FIFO that nobody has opened at its other end",
    "pipe_read": "reads from a pipe",
    "anon_pipe_read": "reads from a pipe",
    "pipe_wait_readable": "reads from a pipe",
    "futex_wait_queue": "waits for a lock",
    "futex_wait_queue_me": "waits for a lock",
    "futex_do_wait": "waits for a lock",
    "do_wait": "waits for another process",
}
"""Wait channels that say more than a system call, or stand in for one that may not be read."""


def is_library(frame: Frame) -> bool:
    """Tell whether a line is not the program's own: torch's, a package's, Python's, the hook's."""
    file = frame.file
    if BUNDLED.search(file):
        return False
    return any(pattern.search(file) for pattern in (STANDARD_LIBRARY, INSTALLED, TORCH, HOOK))


def find_main_stack(process: ProcessState) -> Stack | None:
    """Return the stack of a process's main thread."""
    return next((stack for stack in process.stacks if stack.is_current and stack.frames), None)


def find_place(process: ProcessState) -> Frame | None:
    """Return the innermost line of the main thread in the program's own code.

    If it has none there, as with a program that is installed itself: in another package than torch; else
    the innermost line of all.
    """
    stack = find_main_stack(process)
    if stack is None:
        return None
    own = (frame for frame in stack.frames if not is_library(frame))
    installed = (
        frame
        for frame in stack.frames
        if INSTALLED.search(frame.file) and not TORCH.search(frame.file) and not HOOK.search(frame.file)
    )
    return next(own, None) or next(installed, None) or stack.frames[0]


def show_place(frame: Frame | None) -> str:
    """Return ` at data.py:88, read_shard`, or an empty text."""
    return f" at {PurePath(frame.file).name}:{frame.line}, {frame.function}" if frame else ""


def list_library_frames(process: ProcessState) -> Sequence[Frame]:
    """Return the lines of the main thread within the innermost one of the program's own code."""
    stack = find_main_stack(process)
    if stack is None:
        return ()
    own = next((number for number, frame in enumerate(stack.frames) if not is_library(frame)), None)
    return stack.frames[:own]


def find_distributed_call(process: ProcessState) -> str:
    """Return the function of `torch.distributed` that the main thread is in: `barrier`; empty for none.

    It is the outermost one that the program's own code has called, without decorators' wrappers.
    """
    inside = [
        frame.function
        for frame in list_library_frames(process)
        if DISTRIBUTED.search(frame.file) and frame.function not in DISTRIBUTED_WRAPPERS
    ]
    return inside[-1] if inside else ""


def is_in_backward(process: ProcessState) -> bool:
    """Tell whether the main thread is in autograd's engine, in which DDP waits for its buckets."""
    frames = list_library_frames(process)
    return bool(frames) and AUTOGRAD.search(frames[0].file) is not None


def find_phase(rank: RankEvidence) -> str:
    """Return a rank's phase: by its stack if it compiles, saves or loads there, else by its heartbeat."""
    inside = list_library_frames(rank.process)
    if any(COMPILER.search(frame.file) for frame in inside):
        return "compiling"
    if any(SAVING.search(frame.file) and frame.function in SAVING_FUNCTIONS for frame in inside):
        return "saving"
    if waits_for_data(rank.process):
        return "loading"
    return rank.phase


def waits_for_data(process: ProcessState) -> bool:
    """Tell whether the main thread waits for a DataLoader's workers."""
    return any(
        DATALOADER.search(frame.file) and frame.function in WAITING_FOR_DATA
        for frame in list_library_frames(process)
    )


def is_debugged(rank: RankEvidence) -> bool:
    """Tell whether a debugger holds a rank: one that traces it, or one in its interpreter."""
    stack = find_main_stack(rank.process)
    frames = stack.frames if stack else ()
    return rank.process.tracer > 0 or any(DEBUGGER.search(frame.file) for frame in frames)


def is_working(rank: RankEvidence) -> bool:
    """Tell whether a rank or one of its children used CPU or IO, or went on, while evidence was gathered.

    If that was not seen whole, it did.
    """
    return (
        not rank.is_measured
        or rank.process.stack_changes
        or any(
            process.cpu >= WORKING_CPU or process.io_bytes >= WORKING_IO or process.state == "R"
            for process in (rank.process, *rank.children)
        )
    )


def is_deadlocked(rank: RankEvidence) -> bool:
    """Tell whether all Python threads of a rank wait for locks, so that nobody is left who releases one."""
    stacks = [stack for stack in rank.process.stacks if stack.frames]
    waiting = [stack for stack in stacks if stack.awaits_lock]
    joining = [stack for stack in stacks if is_thread_join(stack)]
    is_waiting = any(stack.is_current for stack in waiting) and len(waiting) + len(joining) == len(stacks)
    return is_waiting and rank.process.system_call in ("", "futex") and not is_working(rank)


def is_thread_join(stack: Stack) -> bool:
    """Tell whether a thread waits for the end of another."""
    first = stack.frames[0]
    return first.file.endswith("/threading.py") and first.function in ("join", "_wait_for_tstate_lock")


def stands_by_itself(rank: RankEvidence) -> bool:
    """Tell whether the main thread does something of its own rather than wait in `torch.distributed`."""
    if find_distributed_call(rank.process) or is_in_backward(rank.process):
        return False
    return describe_process(rank.process) not in ("stands", "waits for a lock") or is_in_lock(rank.process)


def is_in_lock(process: ProcessState) -> bool:
    """Tell whether the main thread waits in Python's `threading`."""
    stack = find_main_stack(process)
    first = stack.frames[0] if stack else None
    return bool(first and first.file.endswith("/threading.py") and first.function in LOCK_FUNCTIONS)


def describe_process(process: ProcessState) -> str:
    """Return what a process does as a verb: `sleeps`, `reads a file`, `computes`, `stands`."""
    if process.state == "t" or process.tracer:
        return f"is held by a debugger (PID {process.tracer})"
    if process.state in STATES:
        return STATES[process.state]
    if process.cpu >= COMPUTING:
        return "computes"
    if is_in_lock(process):
        return "waits for a lock"
    said = CHANNELS.get(process.wait_channel) or CALLS.get(process.system_call)
    if process.state == "D" and process.wait_channel not in CHANNELS:
        where = f", {process.wait_channel}" if process.wait_channel else ""
        return f"{said or 'waits for a disk or a device'} (state D{where})"
    return said or "stands"


def describe_activity(rank: RankEvidence, *, is_waiting: bool = False) -> tuple[str, Frame | None]:
    """Return what a rank does and where, as a sentence without its subject, and the line.

    `is_waiting`: it waits for other ranks, which the kernel's word for that cannot tell.
    """
    process = rank.process
    if process.state not in "TtZX" and waits_for_data(process):
        return describe_data_wait(rank)
    place = find_place(process)
    if is_debugged(rank) and not process.tracer:
        return f"is in a debugger{show_place(place)}", place
    shown = show_place(place)
    if describe_process(process) in UNSPECIFIC:
        if operation := find_distributed_call(process):
            return f"waits in {operation}{shown}", place
        if is_waiting and not is_in_lock(process):
            return f"waits{shown}", place
    if rank.phase == "ended" and process.state not in "TZX":
        return f"is about to exit and {describe_process(process)}{shown}", place
    return f"{describe_process(process)}{shown}", place


def describe_data_wait(rank: RankEvidence) -> tuple[str, Frame | None]:
    """Return which worker a rank waits for, what that does and where."""
    place = find_place(rank.process)
    worker = find_stuck_worker(rank.children)
    if worker is None:
        which = "its DataLoader workers" if rank.children else "a DataLoader worker that is gone"
        return f"waits for {which}{show_place(place)}", place
    inner = find_place(worker)
    doing = describe_process(worker)
    text = f"waits for DataLoader worker {worker.pid}, which {doing}{show_place(inner)}"
    return text, inner or place


def find_stuck_worker(children: Sequence[ProcessState]) -> ProcessState | None:
    """Return the worker that has not answered: one that has ended or is stopped, else one in a dataset.

    A worker without work waits for its queue in torch's loop, which has no line of the program's own.
    """
    for states in ("ZX", "Tt", "D"):
        if found := next((child for child in children if child.state in states), None):
            return found
    return next((child for child in children if is_in_dataset(child)), None) or next(
        (child for child in children if not child.stacks and describe_process(child) == "sleeps"), None
    )


def is_in_dataset(process: ProcessState) -> bool:
    """Tell whether a DataLoader worker fetches an item, rather than wait for one to fetch."""
    stack = find_main_stack(process)
    for frame in stack.frames if stack else ():
        if WORKER_LOOP.search(frame.file):
            return False
        if not is_library(frame) or "/torch/utils/data/_utils/fetch.py" in frame.file:
            return True
    return False
