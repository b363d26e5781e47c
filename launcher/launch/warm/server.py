"""What `sitecustomize` calls in the warm process: imports, then a fork for each rank that is asked for.

Each rank is forked twice, so that the launcher, which takes orphans, becomes its parent. A forked process
carries out the shim's steps, and becomes the rank that exec would have made, or else executes the program.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import PathFinder

from launcher.launch.processes import prepare_agent
from launcher.launch.warm.program import (
    ExecNeededError,
    PythonProgram,
    check_environment,
    find_python_program,
)
from launcher.protocol import LAUNCH_GC
from launcher.rank.hook import is_hooked
from launcher.rank.shim import exec_program, prepare_rank, print_notice

OWN = ("launcher", "launch_inprocess", "sitecustomize")
"""Packages of ours, which the program does not see."""
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
MAX_MESSAGE, STREAMS = 1 << 16, 3
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that SLURM or a terminal may send to all processes of a step."""
STOPPING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
"""Signals that a rank does not ignore at its start, even if the launcher does (nohup)."""
ADOPTION_TICK = 0.0002
BAD_FORK = ("_cuda_isInBadFork", "_xpu_isInBadFork", "_mtia_isInBadFork")
"""Functions of torch that tell whether this process was forked from one that had started a GPU's runtime.
Some calls set that flag and open no device (`poison_fork` of torch/csrc/cuda/Module.cpp)."""
SET_ALLOCATOR = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
SET_BLAS_THREADS = [
    f"{begin}openblas_set_num_threads{end}" for begin in ("scipy_", "") for end in ("64_", "")
]
"""Names of OpenBLAS's function in NumPy's, SciPy's and other builds."""


def serve_ranks(text: str, hook: str, root: str, before: frozenset[str]) -> None:
    """Serve as the warm process until the launcher ends; returns in each rank that is forked.

    `text` is the variable from the launcher, `hook` our folder on PYTHONPATH, and `root`, first on
    `sys.path`, the folder of our package; `before` are the modules that there were before ours.
    """
    try:
        settings = json.loads(text)
        prepare_agent(settings["launcher"], IGNORED, signal.SIGKILL)
        sys.path.remove(root)  # the imports find what the program's find
        os.set_inheritable(settings["socket"], False)
        server = socket.socket(fileno=settings["socket"])
        own = dict(os.environ)
        try:
            preload(settings["preload"], hook)
        except ExecNeededError as error:
            answer(server, str(error))
            os._exit(0)
        names = {name.partition(".")[0] for name in sys.modules.keys() - before}
        gc.freeze()  # a collection in a rank would copy the pages that all share
        answer(server, os.getpid())
        argv, environ = fork_ranks(server)
        sys.path.insert(0, root)
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)
        argv, status = prepare_rank(argv, environ)
        if status:
            os._exit(status)
        try:
            become_program(find_python_program(argv, environ), environ, own, names)
        except Exception as error:
            if environ.get("LOCAL_RANK", "0") == "0":
                reason = error if isinstance(error, ExecNeededError) else repr(error)
                print_notice(f"this program starts by itself, not from the warm process: {reason}")
            os._exit(exec_program(argv, environ))
        # The program may have modules of the same names as ours.
        forget_modules(OWN[0])
        sys.path.remove(root)
        sys.path_importer_cache.clear()
    except BaseException as error:  # the program must not run in this process
        os.write(2, f"launch-rank: the warm process has failed: {type(error).__name__}: {error}\n".encode())
        os._exit(1)


def answer(server: socket.socket, value: int | str) -> None:
    """Tell the launcher the PID of this process or of a rank, or why no rank is forked."""
    server.send(json.dumps(value).encode())


def preload(modules: Sequence[str], hook: str) -> None:
    """Import modules; raises ExecNeededError if an import fails, or leaves what does not go over a fork.

    `hook` is our folder on PYTHONPATH.
    """
    for name in ("sitecustomize", "usercustomize"):
        spec = PathFinder.find_spec(name, [entry for entry in sys.path if entry not in ("", hook)])
        path = (spec and spec.origin) or ""
        if path and os.path.dirname(path) != os.path.dirname(os.__file__):  # distributions have one there
            raise ExecNeededError(f"{path} runs before the program, and may change what is imported")
    environ, value = dict(os.environ), os.environ.get(BLAS_THREADS)
    os.putenv(BLAS_THREADS, "1")  # OpenBLAS starts its threads as it is loaded
    gc.disable()  # what the imports make stays, and to look at it costs a seventh of the time
    for name in modules:
        try:
            import_module(name)
        except BaseException as error:
            text = " ".join(str(error).split())
            raise ExecNeededError(f"`import {name}` fails: {type(error).__name__}: {text}") from None
    gc.enable()
    os.unsetenv(BLAS_THREADS) if value is None else os.putenv(BLAS_THREADS, value)
    # The hook notes where functions are that it replaces in a rank; its modules stay for the ranks.
    __import__("launch_inprocess.import_hook").import_hook.note_copies()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        raise ExecNeededError("the imports have started a process")
    effects = {
        "set variables": dict(os.environ) != environ,
        "started threads": len(os.listdir("/proc/self/task")) > 1,
        "printed something": os.fstat(1).st_size > 0,
    }
    if any(effects.values()):
        did = " and ".join(what for what, is_so in effects.items() if is_so)
        raise ExecNeededError(f"the imports have {did}")


def fork_ranks(server: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Fork ranks as they are asked for; returns in a rank alone, with its argv and environment.

    Ends this process with the launcher. A request comes as descriptors: of a file with its JSON, and for the
    rank's stdin, stdout and stderr.
    """
    while True:
        _, descriptors, _, _ = socket.recv_fds(server, MAX_MESSAGE, STREAMS + 1)
        if len(descriptors) != STREAMS + 1:
            os._exit(0)
        if (middle := os.fork()) == 0:
            break
        if os.waitpid(middle, 0)[1]:
            answer(server, "a rank could not be forked")
        for descriptor in descriptors:
            os.close(descriptor)
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    os.setsid()
    while os.getppid() == middle:
        time.sleep(ADOPTION_TICK)
    answer(server, os.getpid())
    server.close()
    for number, descriptor in enumerate(descriptors[1:]):
        os.dup2(descriptor, number)
    request = json.loads(os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0))
    for descriptor in descriptors:
        os.close(descriptor)
    return request["argv"], request["environ"]


def become_program(
    program: PythonProgram, environ: dict[str, str], before: Mapping[str, str], names: set[str]
) -> None:
    """Make this process as the program finds it at its first line, after the shim's steps.

    `before` are the variables that the imports were made with, and `names` the modules that they have loaded.
    Raises ExecNeededError if a program would find something else by itself.
    """
    if program.command[: program.first_argument] != tuple(sys.orig_argv[: program.first_argument]):
        raise ExecNeededError("the warm process was started for another command line")
    check_environment(before, environ)
    # The folder that Python puts first on `sys.path`.
    folder = program.name if program.kind == "file" else os.getcwd()
    if not os.path.isdir(folder):
        folder = os.path.dirname(os.path.realpath(folder))
    for name in sorted(names - {*OWN, *sys.builtin_module_names}):
        if (spec := PathFinder.find_spec(name, [folder])) and spec.origin:
            raise ExecNeededError(f"the program's folder has a module {name} of its own")
    native = getattr(sys.modules.get("torch"), "_C", None)
    if any(getattr(native, function, bool)() for function in BAD_FORK):
        raise ExecNeededError("the imports have started a GPU's runtime, which no fork can use")
    apply_thread_counts(environ)
    apply_allocator_settings(before, environ)
    sys.argv[1:] = program.command[program.first_argument :]
    sys.orig_argv[:] = program.command
    os.environ.clear()
    os.environ.update(environ)
    if not is_hooked(environ):
        forget_modules("launch_inprocess")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as an interpreter does at its start
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What each process draws or notes by itself: its thread's number, keys, seeds.
    getattr(__import__("threading").main_thread(), "_set_native_id", lambda: None)()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):  # its generator on the CPU begins with a random number
        torch.default_generator.seed()
    # Frozen objects keep their pages shared: a full collection writes to each object. At the end all are
    # shown to the collector, after the program's own exit handlers: only then do the interpreter's last
    # collections free what the program holds in cycles, and write what is buffered there.
    if not is_hooked(environ) or environ.get(LAUNCH_GC, "default").startswith(("default", "disabled")):
        gc.unfreeze()
    else:
        atexit.register(gc.unfreeze)
    # The warm process has had files, as ranks with logs have (`create_stdio` in pylifecycle.c).
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.write_through:
        sys.stdout.reconfigure(line_buffering=os.isatty(1))


def apply_allocator_settings(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Apply a rank's settings (`after`), which the warm process (`before`) did not have.

    Raises ExecNeededError for what counts from the import on: another allocator (`backend:`), a setting that
    is taken back. A torch without GPUs reads none.
    """
    torch = sys.modules.get("torch")
    names = [f"PYTORCH_{device}ALLOC_CONF" for device in ("", "CUDA_", "HIP_")]
    old, new = ([environ[name] for name in names if environ.get(name)] for environ in (before, after))
    if torch and (torch.version.cuda or torch.version.hip) and old != new:
        apply = next((getattr(torch._C, name) for name in SET_ALLOCATOR if hasattr(torch._C, name)), None)
        if old or "backend" in new[0] or apply is None:
            raise ExecNeededError("the allocator's settings count from the import of torch on")
        apply(new[0])


def apply_thread_counts(environ: Mapping[str, str]) -> None:
    """Give torch and OpenBLAS the threads that they would take from a rank's variables at their import.

    A plan sets OMP_NUM_THREADS for each rank. Raises ExecNeededError without it, or what torch raises.
    """
    names, allowed = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", BLAS_THREADS), len(os.sched_getaffinity(0))
    mkl, openmp, blas = (int(environ.get(name) or 0) for name in names)
    if torch := sys.modules.get("torch"):
        if not openmp:
            raise ExecNeededError("no OMP_NUM_THREADS tells its number of threads")
        torch.set_num_threads(mkl or openmp)
    # Every OpenBLAS was loaded with one thread, so that none was started before the fork.
    if (count := min(blas or openmp or allowed, allowed)) > 1:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {f"/{line.partition('/')[2].rstrip()}" for line in file if "openblas" in line}
        for library in map(ctypes.CDLL, sorted(paths)):
            for name in SET_BLAS_THREADS:
                getattr(library, name, int)(count)


def forget_modules(package: str) -> None:
    """Have a package, and all that is in it, be imported again by whoever asks for it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
