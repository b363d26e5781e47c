"""Makes a forked process the rank that exec would have made: its streams, variables, threads and seeds."""

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
from collections.abc import Mapping
from importlib.machinery import all_suffixes

from launcher.launch.warm.python_program import (
    ALLOCATOR,
    THREADS,
    ExecNeededError,
    PythonProgram,
    check_environment,
    find_python_program,
    list_changed_variables,
)
from launcher.launch.warm.serving import PR_SET_NAME, Preloaded, RankRequest, list_mapped_files
from launcher.protocol import LAUNCH_GC
from launcher.rank.hook import is_hooked
from launcher.rank.shim import exec_program, prepare_rank, print_notice

STOPPING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)
"""Signals that a rank does not ignore at its start, even if the launcher does (nohup)."""
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
BAD_FORK = ("_cuda_isInBadFork", "_xpu_isInBadFork", "_mtia_isInBadFork")
"""Functions of torch that tell whether this process was forked from one that had started a GPU's runtime.
Some calls set that flag and open no device (`poison_fork` of torch/csrc/cuda/Module.cpp)."""
SET_ALLOCATOR = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
TORCH_THREADS, BLAS_THREADS = THREADS[:2], THREADS[2:]
INIT_THREADS = "_ZN2at16init_num_threadsEv"
"""`at::init_num_threads()`, which `torch._C` calls as it is loaded: OpenMP's number for the main thread is
MKL's, or what the environment says in builds without MKL (ATen/ParallelOpenMP.cpp). `torch.set_num_threads`
starts threads, which a program by itself would not have after its imports."""
MKL_SET_THREADS, MKL_ALL_DOMAINS = "mkl_serv_domain_set_num_threads", 0
"""What MKL calls with the number from the environment; it takes no more than the cores for its own."""
BLAS_SET_THREADS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "")
)
"""Names of OpenBLAS's function in NumPy's, SciPy's and other builds."""


def become_rank(request: RankRequest, preloaded: Preloaded, name: bytes) -> None:
    """Carry out the shim's steps in this process, so that what comes next is the program's first line.

    If the program would not be as it is by itself, it is executed instead. `name` is the process's name.
    """
    for number, descriptor in enumerate(request.streams):
        os.dup2(descriptor, number)
    for descriptor in request.streams:
        os.close(descriptor)
    _replace_environ(request.environ)
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    environ = dict(request.environ)
    is_restart = environ.get(RESTART_COUNT, "0") != "0"
    argv, status = prepare_rank(request.argv, environ)
    if status:
        os._exit(status)
    try:
        check_rank(argv, environ, preloaded, is_restart=is_restart)
        _become_program(environ, preloaded, name)
    except Exception as error:
        is_refusal = isinstance(error, ExecNeededError)
        if not is_refusal or environ.get("LOCAL_RANK") in (None, "0"):
            reason = error if is_refusal else f"{type(error).__name__}: {error}"
            print_notice(f"this program starts by itself, not from the warm process: {reason}")
        os._exit(exec_program(argv, environ))


def check_rank(argv: list[str], environ: dict[str, str], preloaded: Preloaded, *, is_restart: bool) -> None:
    """Raise ExecNeededError if a program would find other modules, variables or GPUs by itself."""
    program = find_python_program(argv, environ)
    if program.command[: program.first_argument] != tuple(sys.orig_argv[: program.first_argument]):
        raise ExecNeededError("the warm process was started for another command line")
    sys.argv[1:] = program.command[program.first_argument :]
    sys.orig_argv[:] = program.command
    check_environment(preloaded.environ, environ)
    for name in sorted(preloaded.asked.intersection(environ).difference(THREADS, ALLOCATOR)):
        raise ExecNeededError(f"the imports have asked for {name}, which the rank has")
    for name in sorted(preloaded.names.intersection(list_own_modules(program))):
        raise ExecNeededError(f"the program's folder has a module {name} of its own")
    if is_restart and (path := preloaded.find_changed_file()):
        raise ExecNeededError(f"{path} has changed since it was imported")
    native = getattr(sys.modules.get("torch"), "_C", None)
    if any(getattr(native, function, bool)() for function in BAD_FORK):
        raise ExecNeededError("the imports have started a GPU's runtime, which no fork can use")


def list_own_modules(program: PythonProgram) -> set[str]:
    """Return the names of modules and folders in the folder that Python puts first on `sys.path`."""
    folder = program.name if program.kind == "file" else os.getcwd()
    if not os.path.isdir(folder):
        folder = os.path.dirname(os.path.realpath(folder))
    elif program.kind != "file" and sys.flags.safe_path:
        return set()
    try:
        entries = os.listdir(folder)
    except OSError:
        return set()
    suffixes = tuple(all_suffixes())
    return {entry.partition(".")[0] for entry in entries if "." not in entry or entry.endswith(suffixes)}


def _become_program(environ: dict[str, str], preloaded: Preloaded, name: bytes) -> None:
    """Make this process as an interpreter is before its program's first line; raises ExecNeededError."""
    apply_thread_counts(preloaded.environ, environ, preloaded.cpus)
    apply_allocator_settings(preloaded.environ, environ)
    _replace_environ(environ)
    for changed, value in preloaded.changes.items():
        os.environ.pop(changed, None) if value is None else os.environ.__setitem__(changed, value)
    if not is_hooked(environ):
        for module in [module for module in sys.modules if module.partition(".")[0] == "launch_inprocess"]:
            del sys.modules[module]
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as an interpreter does at its start
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    renew_identity(name)
    thaw_objects(environ)
    settle_streams()


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


def renew_identity(name: bytes) -> None:
    """Renew what each process draws or notes by itself: seeds, keys, its name and thread."""
    import threading

    ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)
    getattr(threading.main_thread(), "_set_native_id", lambda: None)()
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):  # its generator on the CPU begins with a random number
        torch.default_generator.seed()
    if random := sys.modules.get("random"):
        random.seed()


def settle_streams() -> None:
    """Have `sys.stdin`, `sys.stdout` and `sys.stderr` fit what their descriptors are now.

    The objects stay, which handlers of logging may hold. The warm process has had files, as ranks with logs
    have; lines of a terminal's stdout are written one by one (`create_stdio` in pylifecycle.c).
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        try:
            os.fstat(number)
        except OSError:
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
            continue
        if number == 1 and isinstance(stream, io.TextIOWrapper) and not stream.write_through:
            stream.reconfigure(line_buffering=os.isatty(number))


def apply_allocator_settings(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Apply a rank's settings (`after`), which the warm process (`before`) did not have.

    Raises ExecNeededError for what counts from the import on: another allocator (`backend:`), a setting that
    is taken back. A torch without GPUs reads none.
    """
    torch = sys.modules.get("torch")
    old, new = (tuple(environ.get(name, "") for name in ALLOCATOR) for environ in (before, after))
    if torch is None or not (torch.version.cuda or torch.version.hip) or old == new:
        return
    text = next(filter(None, new), "")
    if any(old) or "backend" in text:
        raise ExecNeededError("the allocator's settings count from the import of torch on")
    apply = next(filter(None, (getattr(vars(torch)["_C"], name, None) for name in SET_ALLOCATOR)), None)
    if apply is None:
        raise ExecNeededError("this torch has no function for the allocator's settings")
    apply(text)


def apply_thread_counts(before: Mapping[str, str], after: Mapping[str, str], cpus: int) -> None:
    """Give torch and OpenBLAS the threads that they would take from a rank's variables (`after`).

    `before` are the warm process's, and `cpus` is how many CPUs that may use. Raises ExecNeededError if
    a number cannot be set. No thread is started that a program would not have after its own imports.
    """
    allowed = len(os.sched_getaffinity(0))
    changed = [name for name in list_changed_variables(before, after) if name in TORCH_THREADS]
    if changed or (allowed != cpus and not any(after.get(name) for name in TORCH_THREADS)):
        set_torch_threads(read_thread_count(after, TORCH_THREADS[::-1]))
    given = [name for name in (*BLAS_THREADS, TORCH_THREADS[0]) if after.get(name)]
    count = min(read_thread_count(after, (given[0],)) if given else allowed, allowed)
    # Every OpenBLAS was loaded with one thread, so that none was started before the fork.
    for path in list_mapped_files() if count > 1 else ():
        if "openblas" in os.path.basename(path):
            library = ctypes.CDLL(path)
            functions = filter(None, (getattr(library, name, None) for name in BLAS_SET_THREADS))
            next(functions, int)(count)


def read_thread_count(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    """Return the number in the first of these variables that is set; raises ExecNeededError."""
    name = next((name for name in names if environ.get(name)), "")
    if not name:
        raise ExecNeededError("the rank may use other CPUs, and no variable tells its number of threads")
    text = environ[name]
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 6 and int(text)):
        raise ExecNeededError(f"{name}={text} is no number of threads that can be set after the imports")
    return int(text)


def set_torch_threads(count: int) -> None:
    """Set the threads of torch's operations, those of MKL in it among them."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    library = ctypes.CDLL(os.path.join(os.path.dirname(str(torch.__file__)), "lib", "libtorch_cpu.so"))
    initialize, set_mkl = getattr(library, INIT_THREADS, None), getattr(library, MKL_SET_THREADS, None)
    if initialize is None or (set_mkl is None and torch.backends.mkl.is_available()):
        raise ExecNeededError("this torch has no function by which its threads are set as at its import")
    if set_mkl is not None:
        set_mkl(count, MKL_ALL_DOMAINS)
    initialize()


def _replace_environ(environ: dict[str, str]) -> None:
    """Have `os.environ`, and the C library's environment with it, hold exactly these variables."""
    os.environ.clear()
    os.environ.update(environ)
