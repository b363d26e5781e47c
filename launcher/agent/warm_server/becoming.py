"""Makes a forked process the rank that exec would have made: its streams, variables, threads and seeds."""

import atexit
import gc
import io
import os
import signal
import sys
from typing import BinaryIO, TextIO, cast

from launcher.agent.python_program import ExecNeededError, find_python_program
from launcher.agent.start_method import is_read_by_imports, list_changed_variables
from launcher.agent.warm_server.allocator_settings import apply_allocator_settings
from launcher.agent.warm_server.command_line_text import show_command_line
from launcher.agent.warm_server.fork_state import require_usable_gpus
from launcher.agent.warm_server.forking import STOPPING, ForkServer, RankRequest
from launcher.agent.warm_server.preloading import Preloaded
from launcher.agent.warm_server.thread_counts import apply_thread_counts
from launcher.protocol import LAUNCH_GC
from launcher.rank.hook import is_hooked
from launcher.rank.shim import exec_program, prepare_rank, print_notice

STREAM_NAMES = ("stdin", "stdout", "stderr")


def become_rank(server: ForkServer, request: RankRequest, preloaded: Preloaded, name: bytes) -> None:
    """Carry out the shim's steps in this process, so that what comes next is the program's first line.

    If the program would not be as it is by itself, it is executed instead. `name` is the process's name.
    """
    attach_streams(request.streams)
    replace_environ(request.environ)
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    environ = dict(request.environ)
    argv, status = prepare_rank(request.argv, environ)
    if status:
        os._exit(status)
    try:
        set_arguments(argv, environ)
        server.check_rank(environ, preloaded)
        become_program(environ, preloaded, name)
    except Exception as error:
        is_refusal = isinstance(error, ExecNeededError)
        if not is_refusal or environ.get("LOCAL_RANK") in (None, "0"):
            reason = error if is_refusal else f"{type(error).__name__}: {error}"
            print_notice(f"this program starts by itself, not from the warm process: {reason}")
        os._exit(exec_program(argv, environ))
    replay_output(preloaded.output)


def become_program(environ: dict[str, str], preloaded: Preloaded, name: bytes) -> None:
    """Make this process as an interpreter is before its program's first line; raises ExecNeededError."""
    require_usable_gpus()
    apply_import_settings(environ, preloaded)
    replace_environ(environ)
    show_command_line(sys.orig_argv, environ)
    for changed, value in preloaded.changes.items():
        os.environ.pop(changed, None) if value is None else os.environ.__setitem__(changed, value)
    watch_environ(preloaded)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as an interpreter does at its start
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    renew_identity(name)
    thaw_objects(environ)
    reopen_streams()


def thaw_objects(environ: dict[str, str]) -> None:
    """Show the imports' objects to the collector again, unless the rank's policy freezes what stays anyway.

    Frozen objects keep their pages shared: a full collection writes to each object. At the end all are shown,
    after the program's own exit handlers: only then do the interpreter's last collections free what the
    program holds in cycles (a file that a function's globals refer to), and write what is buffered there.
    """
    policy = environ.get(LAUNCH_GC, "default").partition(",")[0]
    if not is_hooked(environ) or policy in ("default", "disabled"):
        gc.unfreeze()
    else:
        atexit.register(gc.unfreeze)


def attach_streams(descriptors: list[int]) -> None:
    """Make the descriptors stdin, stdout and stderr."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)


def replace_environ(environ: dict[str, str]) -> None:
    """Have `os.environ`, and the C library's environment with it, hold exactly these variables."""
    os.environ.clear()
    os.environ.update(environ)


def set_arguments(argv: list[str], environ: dict[str, str]) -> None:
    """Set the program's arguments; raises ExecNeededError if this interpreter has another program."""
    program = find_python_program(argv, environ)
    if program.prefix != tuple(sys.orig_argv[: program.first_argument]):
        raise ExecNeededError("the warm process was started for another command line")
    sys.argv[1:] = program.arguments
    sys.orig_argv[:] = program.command


def apply_import_settings(environ: dict[str, str], preloaded: Preloaded) -> None:
    """Set again what the imports have read of the environment; raises ExecNeededError if that cannot be."""
    apply_thread_counts(preloaded.environ, environ, preloaded.cpus)
    apply_allocator_settings(preloaded.environ, environ)


def renew_identity(name: bytes) -> None:
    """Renew what each process draws or notes by itself: seeds, keys, its name and thread."""
    import ctypes
    import threading

    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
    main = threading.main_thread()
    getattr(main, "_set_native_id", lambda: None)()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    torch = sys.modules.get("torch")
    if torch is not None:  # its generator on the CPU begins with a random number
        torch.default_generator.seed()
    random = sys.modules.get("random")
    if random is not None:
        random.seed()


def reopen_streams() -> None:
    """Make `sys.stdin`, `sys.stdout` and `sys.stderr` anew for what their descriptors are now.

    The objects stay: what was imported, handlers of logging for instance, may hold them.
    """
    is_raw = isinstance(getattr(sys.stdout or sys.stderr, "buffer", None), io.RawIOBase)
    for number, name in enumerate(STREAM_NAMES):
        stream = getattr(sys, name)
        try:
            os.fstat(number)
        except OSError:
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
            continue
        if isinstance(stream, io.TextIOWrapper):
            reopen_stream(cast("TextIO", stream), number, is_raw=is_raw)


def reopen_stream(stream: TextIO, number: int, *, is_raw: bool) -> None:
    """Make one stream anew as the interpreter does at its start (`create_stdio` in pylifecycle.c).

    `is_raw` is for `python -u` and PYTHONUNBUFFERED.
    """
    encoding, errors = stream.encoding, stream.errors
    buffer: BinaryIO = open(number, "wb" if number else "rb", 0 if is_raw and number else -1, closefd=False)  # noqa: SIM115
    raw = getattr(buffer, "raw", buffer)
    vars(raw)["name"] = f"<{STREAM_NAMES[number]}>"
    by_line = not is_raw and (buffer.isatty() or number == 2)
    make = cast("type[io.TextIOWrapper[BinaryIO]]", type(stream))
    make.__init__(
        cast("io.TextIOWrapper[BinaryIO]", stream),
        buffer,
        encoding,
        errors,
        newline="\n",
        line_buffering=by_line,
        write_through=is_raw,
    )
    vars(stream)["mode"] = "w" if number else "r"


def watch_environ(preloaded: Preloaded) -> None:
    """Look, once the program imports torch, at what it has set before: apply it, or say that it is too late.

    The hook tells of that import. Its modules are the rank's only if the rank has the hook.
    """
    before = dict(os.environ)

    def look(_module: object) -> None:
        after = dict(os.environ)
        changed = list_changed_variables(before, after)
        late = [name for name in changed if is_read_by_imports(name, preloaded.read)]
        try:
            if changed:
                apply_import_settings(after, preloaded)
        except ExecNeededError as error:
            late.append(str(error))
        if late and after.get("LOCAL_RANK", "0") == "0":
            print_notice(f"the ranks are forked with torch, too late for: {', '.join(late)} (start.warm=off)")

    if "torch" in sys.modules:
        __import__("launch_inprocess.import_hook").import_hook.when_framework_is_used(look)
    if not is_hooked(before):
        for name in [name for name in sys.modules if name.partition(".")[0] == "launch_inprocess"]:
            del sys.modules[name]


def replay_output(output: tuple[bytes, ...]) -> None:
    """Write what the imports have written, which each rank's own import would write too."""
    for number, text in enumerate(output, 1):
        if text:
            os.write(number, text)
