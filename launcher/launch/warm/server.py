"""What `sitecustomize` calls in the warm process: imports, then a fork for each rank that is asked for.

Each rank is forked twice, so that the launcher, which takes orphans, becomes its parent. A forked process
carries out the shim's steps, and becomes the rank that exec would have made, or else executes the program.
"""

import atexit
import ctypes
import gc
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import PathFinder, all_suffixes

from launcher.launch.warm.program import (
    ALLOCATOR,
    THREADS,
    ExecNeededError,
    PythonProgram,
    check_environment,
    find_python_program,
    list_changed_variables,
)
from launcher.protocol import LAUNCH_GC
from launcher.rank.hook import is_hooked
from launcher.rank.shim import exec_program, prepare_rank, print_notice

OWN = ("launcher", "launch_inprocess", "sitecustomize")
"""Packages of ours, which the program does not see."""
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "1")
"""For the imports alone: OpenBLAS starts its threads as it is loaded."""
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
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
TORCH_THREADS, BLAS_THREADS = THREADS[:2], THREADS[2:]
INIT_THREADS = "_ZN2at16init_num_threadsEv"
"""`at::init_num_threads()`, which `torch._C` calls as it is loaded: OpenMP's number for the main thread is
MKL's, or what the environment says in builds without MKL (ATen/ParallelOpenMP.cpp). `torch.set_num_threads`
starts threads, which a program by itself would not have after its imports."""
MKL_SET_THREADS, MKL_ALL_DOMAINS = "mkl_serv_domain_set_num_threads", 0
"""What MKL calls with the number from the environment; it takes no more than the cores for its own."""
BLAS_SET_THREADS = [
    f"{begin}openblas_set_num_threads{end}" for begin in ("scipy_", "") for end in ("64_", "")
]
"""Names of OpenBLAS's function in NumPy's, SciPy's and other builds."""


@dataclass(slots=True)
class Preloaded:
    """What the imports were done with, and what they have changed."""

    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    cpus: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """CPUs that this process may use, of which libraries take note."""
    changes: dict[str, str | None] = field(default_factory=dict)
    """Variables that the imports have set, and None for those that they have removed."""
    names: frozenset[str] = frozenset()
    """Top-level modules that a program could have files of the same names for."""

    def load(self, names: Sequence[str], hook: str, before: Collection[str]) -> None:
        """Import modules; raises ExecNeededError if that fails, or leaves what does not go over a fork.

        `hook` is our folder on PYTHONPATH, and `before` are the modules that this interpreter had before any
        of ours, and of what those import.
        """
        is_user_site = bool(getattr(sys.modules.get("site"), "ENABLE_USER_SITE", False))
        for name in ("sitecustomize", "usercustomize")[: 1 + is_user_site]:
            spec = PathFinder.find_spec(name, [entry for entry in sys.path if entry not in ("", hook)])
            path = (spec and spec.origin) or ""
            if path and os.path.dirname(path) not in (os.path.dirname(os.__file__), "/usr/lib/python3"):
                raise ExecNeededError(f"{path} runs before the program, and may change what is imported")
        os.putenv(*ONE_THREAD)  # past `os.environ`, in which Python code would see it
        gc.disable()  # what the imports make stays, and to look at it costs a seventh of the time
        for name in names:
            try:
                import_module(name)
            except BaseException as error:
                text = " ".join(str(error).split())
                raise ExecNeededError(f"`import {name}` fails: {type(error).__name__}: {text}") from None
        gc.enable()
        value = os.environ.get(ONE_THREAD[0])
        os.unsetenv(ONE_THREAD[0]) if value is None else os.putenv(ONE_THREAD[0], value)
        changed = list_changed_variables(self.environ, os.environ)
        self.changes = {name: os.environ.get(name) for name in changed}
        # The hook notes where functions are that it replaces in a rank; its modules stay for the ranks.
        __import__("launch_inprocess.import_hook").import_hook.note_copies()
        tops = {name.partition(".")[0] for name in sys.modules.keys() - before}
        self.names = frozenset(tops) - {*OWN, *sys.builtin_module_names}
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            raise ExecNeededError(f"the imports have started {threads - 1} more thread{'s' * (threads > 2)}")
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            pass
        else:
            raise ExecNeededError("the imports have started a process")
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        if any(os.fstat(descriptor).st_size for descriptor in (1, 2)):
            raise ExecNeededError("the imports have printed something")


def serve_ranks(text: str, hook: str, root: str, before: frozenset[str]) -> None:
    """Serve as the warm process until the launcher ends; returns in each rank that is forked.

    `text` is the variable from the launcher, `hook` our folder on PYTHONPATH, and `root`, first on
    `sys.path`, the folder of our package; `before` are the modules that there were before ours.
    """
    try:
        settings = json.loads(text)
        with open("/proc/self/comm", "rb") as file:
            name = file.read().rstrip(b"\n")
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        libc.prctl(PR_SET_NAME, b"launch-warm", 0, 0, 0)
        if os.getppid() != settings["launcher"]:
            os._exit(0)
        sys.path.remove(root)  # the imports find what the program's find
        os.set_inheritable(settings["socket"], False)
        server = socket.socket(fileno=settings["socket"])
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        preloaded = Preloaded()
        try:
            preloaded.load(settings["preload"], hook, before)
        except ExecNeededError as error:
            _reply(server, refused=str(error))
            os._exit(0)
        gc.freeze()  # a collection in a rank would copy the pages that all share
        _reply(server, ready=os.getpid())
        argv, environ = _fork_ranks(server)
        sys.path.insert(0, root)
        become_rank(argv, environ, preloaded, name)
        # The program may have modules of the same names as ours.
        _forget_modules(OWN[0])
        sys.path.remove(root)
        folder = os.path.join(root, OWN[0])
        for path in [path for path in sys.path_importer_cache if f"{path}/".startswith(f"{folder}/")]:
            del sys.path_importer_cache[path]
        if root not in sys.path:
            sys.path_importer_cache.pop(root, None)
    except BaseException as error:  # the program must not run in this process
        os.write(2, f"launch-rank: the warm process has failed: {type(error).__name__}: {error}\n".encode())
        os._exit(1)


def _fork_ranks(server: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Fork ranks as they are asked for; returns in a rank alone, with its argv and environment.

    Ends this process with the launcher. A request comes as descriptors: of a file with its JSON, and for the
    rank's stdin, stdout and stderr.
    """
    while True:
        _, descriptors, _, _ = socket.recv_fds(server, MAX_MESSAGE, STREAMS + 1)
        if len(descriptors) != STREAMS + 1:
            os._exit(0)
        try:
            is_rank = _fork_twice(server)
        except OSError as error:
            is_rank = False
            _reply(server, refused=f"a rank could not be forked ({error})")
        if is_rank:
            for number, descriptor in enumerate(descriptors[1:]):
                os.dup2(descriptor, number)
            text = os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        if is_rank:
            request = json.loads(text)
            return request["argv"], request["environ"]


def _fork_twice(server: socket.socket) -> bool:
    """Fork a process whose parent ends at once; returns True in that process, which tells its PID.

    Raises OSError.
    """
    middle = os.fork()
    if middle:
        if os.waitpid(middle, 0)[1]:
            raise OSError("its parent has ended")
        return False
    middle = os.getpid()
    try:
        if os.fork():
            os._exit(0)
        os.setsid()
        while os.getppid() == middle:
            time.sleep(ADOPTION_TICK)
        if not _reply(server, pid=os.getpid()):
            os._exit(1)
        server.close()
    except BaseException:  # neither of the two may go on to serve
        os._exit(1)
    return True


def _reply(server: socket.socket, **message: object) -> bool:
    """Send a message to the launcher; tell whether it is there to get it."""
    try:
        server.send(json.dumps(message).encode())
    except OSError:
        return False
    return True


def become_rank(argv: list[str], environ: dict[str, str], preloaded: Preloaded, name: bytes) -> None:
    """Carry out the shim's steps in this process, so that what comes next is the program's first line.

    If the program would not be as it is by itself, it is executed instead. `name` is the process's name.
    """
    _replace_environ(environ)
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    argv, status = prepare_rank(argv, environ)
    if status:
        os._exit(status)
    try:
        program = find_python_program(argv, environ)
        check_rank(program, environ, preloaded)
        sys.argv[1:] = program.command[program.first_argument :]
        sys.orig_argv[:] = program.command
        apply_thread_counts(preloaded, environ)
        apply_allocator_settings(preloaded.environ, environ)
        _replace_environ(environ)
        for changed, value in preloaded.changes.items():
            os.environ.pop(changed, None) if value is None else os.environ.__setitem__(changed, value)
        if not is_hooked(environ):
            _forget_modules("launch_inprocess")
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as an interpreter does at its start
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        renew_identity(name)
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
    except Exception as error:
        is_refusal = isinstance(error, ExecNeededError)
        if not is_refusal or environ.get("LOCAL_RANK") in (None, "0"):
            reason = error if is_refusal else f"{type(error).__name__}: {error}"
            print_notice(f"this program starts by itself, not from the warm process: {reason}")
        os._exit(exec_program(argv, environ))


def check_rank(program: PythonProgram, environ: dict[str, str], preloaded: Preloaded) -> None:
    """Raise ExecNeededError if a program would find other modules, variables or GPUs by itself."""
    if program.command[: program.first_argument] != tuple(sys.orig_argv[: program.first_argument]):
        raise ExecNeededError("the warm process was started for another command line")
    check_environment(preloaded.environ, environ)
    # The folder that Python puts first on `sys.path`.
    folder = program.name if program.kind == "file" else os.getcwd()
    if not os.path.isdir(folder):
        folder = os.path.dirname(os.path.realpath(folder))
    if os.path.isdir(folder) and not (program.kind != "file" and sys.flags.safe_path):
        suffixes = tuple(all_suffixes())
        for entry in sorted(os.listdir(folder)):
            name, _, ending = entry.partition(".")
            if name in preloaded.names and (not ending or entry.endswith(suffixes)):
                raise ExecNeededError(f"the program's folder has a module {name} of its own")
    native = getattr(sys.modules.get("torch"), "_C", None)
    if any(getattr(native, function, bool)() for function in BAD_FORK):
        raise ExecNeededError("the imports have started a GPU's runtime, which no fork can use")


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


def apply_allocator_settings(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Apply a rank's settings (`after`), which the warm process (`before`) did not have.

    Raises ExecNeededError for what counts from the import on: another allocator (`backend:`), a setting that
    is taken back. A torch without GPUs reads none.
    """
    torch = sys.modules.get("torch")
    old, new = ([environ[name] for name in ALLOCATOR if environ.get(name)] for environ in (before, after))
    if torch is None or not (torch.version.cuda or torch.version.hip) or old == new:
        return
    apply = next(filter(None, (getattr(vars(torch)["_C"], name, None) for name in SET_ALLOCATOR)), None)
    if old or "backend" in new[0] or apply is None:
        raise ExecNeededError("the allocator's settings count from the import of torch on")
    apply(new[0])


def apply_thread_counts(preloaded: Preloaded, after: Mapping[str, str]) -> None:
    """Give torch and OpenBLAS the threads that they would take from a rank's variables (`after`).

    Raises ExecNeededError if a number cannot be set. No thread is started that a program would not have after
    its own imports.
    """
    allowed = len(os.sched_getaffinity(0))
    is_changed = not {*TORCH_THREADS}.isdisjoint(list_changed_variables(preloaded.environ, after))
    torch = sys.modules.get("torch")
    if is_changed or (allowed != preloaded.cpus and not any(after.get(name) for name in TORCH_THREADS)):
        count = read_thread_count(after, TORCH_THREADS[::-1])
        if not count:
            raise ExecNeededError("the rank may use other CPUs, and no variable tells its number of threads")
        if torch is not None:
            library = ctypes.CDLL(f"{os.path.dirname(str(torch.__file__))}/lib/libtorch_cpu.so")
            initialize, set_mkl = (getattr(library, name, None) for name in (INIT_THREADS, MKL_SET_THREADS))
            if initialize is None or (set_mkl is None and torch.backends.mkl.is_available()):
                raise ExecNeededError("this torch has no function that sets its threads as at its import")
            if set_mkl is not None:
                set_mkl(count, MKL_ALL_DOMAINS)
            initialize()
    count = min(read_thread_count(after, (*BLAS_THREADS, TORCH_THREADS[0])) or allowed, allowed)
    # Every OpenBLAS was loaded with one thread, so that none was started before the fork.
    if count > 1:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {f"/{line.partition('/')[2].rstrip()}" for line in file if "openblas" in line}
        for library in map(ctypes.CDLL, sorted(paths)):
            next(filter(None, (getattr(library, name, None) for name in BLAS_SET_THREADS)), int)(count)


def read_thread_count(environ: Mapping[str, str], names: Sequence[str]) -> int:
    """Return the number in the first of these variables that is set; 0 if none is; raises ExecNeededError."""
    name = next((name for name in names if environ.get(name)), "")
    text = environ.get(name, "0")
    if name and not (text.isascii() and text.isdecimal() and 0 < len(text) < 6 and int(text)):
        raise ExecNeededError(f"{name}={text} is no number of threads that can be set after the imports")
    return int(text)


def _forget_modules(package: str) -> None:
    """Have a package, and all that is in it, be imported again by whoever asks for it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def _replace_environ(environ: Mapping[str, str]) -> None:
    """Have `os.environ`, and the C library's environment with it, hold exactly these variables."""
    os.environ.clear()
    os.environ.update(environ)
