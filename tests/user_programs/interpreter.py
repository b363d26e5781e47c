"""What a program can see of its interpreter, one item a line."""

import atexit
import builtins
import codecs
import faulthandler
import gc
import inspect
import io
import linecache
import locale
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
import warnings

import torch


class Point:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Point and other.x == self.x

    __hash__ = None


def show(name, value):
    print(f"{name}: {value!r}")


def show_main():
    main = sys.modules["__main__"]
    show("names of __main__", sorted(name for name in vars(main) if name.startswith("__")))
    show("__name__", __name__)
    show("__file__", getattr(main, "__file__", None))
    show("__spec__", getattr(main.__spec__, "name", main.__spec__))
    show("__package__", __package__)
    show("__cached__", getattr(main, "__cached__", "none"))
    show("__loader__", type(getattr(main, "__loader__", None)).__name__)
    show("__builtins__", main.__builtins__ is builtins)
    show("__doc__", (__doc__ or "")[:20])
    point = pickle.loads(pickle.dumps(Point(3)))
    show("pickle", point == Point(3))
    show("module of Point", Point.__module__)
    try:
        show("source", inspect.getsource(Point.__init__))
    except (OSError, TypeError) as error:
        show("source", error)
    show("linecache", len(linecache.getlines(__file__)) if "__file__" in globals() else None)


def show_sys():
    for name in ("argv", "path", "flags", "executable", "prefix", "dont_write_bytecode", "warnoptions"):
        show(name, getattr(sys, name))
    show("orig_argv", sys.orig_argv)
    show(
        "cmdline",
        open("/proc/self/cmdline", "rb").read().split(b"\0") if "PROBE_CMDLINE" in os.environ else 0,
    )
    show("comm", open("/proc/self/comm").read())
    show("exe", os.readlink("/proc/self/exe"))
    show("_xoptions", sys._xoptions)
    show(
        "meta_path",
        [
            getattr(found, "__name__", type(found).__name__)
            for found in sys.meta_path
            if type(found).__name__ != "ImportWatcher"
        ],
    )
    show("path_hooks", len(sys.path_hooks))
    show("hooks", (sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__))
    show("unraisablehook", sys.unraisablehook is sys.__unraisablehook__)
    show("threading.excepthook", threading.excepthook is threading.__excepthook__)
    show("trace", (sys.gettrace(), sys.getprofile()))
    show("recursion", sys.getrecursionlimit())
    show("switch", sys.getswitchinterval())
    show("int digits", sys.get_int_max_str_digits())
    show("ours", sorted(name for name in sys.modules if name.partition(".")[0] in ("launcher",)))
    show("sitecustomize", "sitecustomize" in sys.modules)
    show(
        "not loaded",
        [
            name
            for name in ("pdb", "cProfile", "torch._dynamo", "unittest.mock", "hydra")
            if name in sys.modules
        ],
    )


def show_streams():
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        show(
            name,
            (
                type(stream).__name__,
                stream.name,
                stream.mode,
                stream.encoding,
                stream.errors,
                stream.line_buffering,
                stream.write_through,
                stream.newlines,
                stream.isatty(),
                stream.fileno(),
            ),
        )
        show(
            f"{name}'s buffer",
            (
                type(stream.buffer).__name__,
                type(getattr(stream.buffer, "raw", None)).__name__,
                stream is getattr(sys, f"__{name}__"),
            ),
        )
    show(
        "default encoding",
        (sys.getdefaultencoding(), sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()),
    )
    show("locale", (locale.getlocale(), locale.getpreferredencoding(), locale.setlocale(locale.LC_ALL)))
    show("buffer size", io.DEFAULT_BUFFER_SIZE)
    show("codecs", codecs.lookup("utf-8").name)
    print("žluťoučký kůň 馬")


def is_inherited(number):
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


def show_process():
    show("cwd", os.getcwd())
    show("umask", os.umask(0o22))
    show("group leader", os.getpgrp() == os.getpid())
    show("session leader", os.getsid(0) == os.getpid())
    show("nice", os.nice(0))
    show("inherited descriptors", [number for number in range(100) if is_inherited(number)])
    show(
        "threads",
        (
            threading.active_count(),
            threading.main_thread() is threading.current_thread(),
            threading.main_thread().native_id == os.getpid(),
            threading.current_thread().name,
        ),
    )
    show("children", open(f"/proc/self/task/{os.getpid()}/children").read())
    names = {number: signal.Signals(number).name for number in signal.valid_signals() if number < 32}
    show(
        "handlers",
        {
            name: str(signal.getsignal(number)).split(" at ")[0]
            for number, name in names.items()
            if number not in (9, 19) and signal.getsignal(number) is not signal.SIG_DFL
        },
    )
    show("blocked", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    masks = [line.split() for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn"))]
    show("masks", [(name, hex(int(mask, 16) & 0x7FFFFFFF)) for name, mask in masks])
    show("limits", [resource.getrlimit(number) for number in (resource.RLIMIT_CORE, resource.RLIMIT_STACK)])
    show("faulthandler", faulthandler.is_enabled())
    show("timers", (signal.getitimer(signal.ITIMER_REAL), time.tzname))


def show_python():
    show("gc", (gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks), len(gc.garbage)))
    show("gc sees a class of torch", any(found is torch.nn.Module for found in gc.get_objects()))
    show(
        "filters",
        [
            (
                kind,
                getattr(text, "pattern", text),
                category.__name__,
                getattr(module, "pattern", module),
                line,
            )
            for kind, text, category, module, line in warnings.filters
        ],
    )
    root = logging.getLogger()
    show(
        "logging",
        (
            root.level,
            root.handlers,
            logging.getLogger("torch").level,
            sorted(logging.root.manager.loggerDict)[:3],
        ),
    )
    show("stack", [frame.name for frame in traceback.extract_stack()])
    show(
        "multiprocessing",
        (
            multiprocessing.current_process().name,
            multiprocessing.get_start_method(allow_none=True),
            multiprocessing.parent_process(),
            len(multiprocessing.current_process().authkey),
        ),
    )
    for name in sorted(os.environ):
        if not name.startswith(("LAUNCH", "TORCHELASTIC", "TORCH_NCCL", "TORCH_FR")) and name not in HIDDEN:
            show("variable", name)
    show("hash", hash("text") if "PYTHONHASHSEED" in os.environ else None)


HIDDEN = (
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "TORCH_ELASTIC_WORKER_IDENTICAL",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_DEVICE_ORDER",
    "PYTHONPATH",
    "CUDA_MODULE_LOADING",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_INCLUDE_ONLY_ACTIVE",
    "LC_CTYPE",
    "TORCHINDUCTOR_COMPILE_THREADS",
    *(f"{name}_NUM_THREADS" for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB", "BLIS")),
)


def show_torch():
    show("threads of torch", (torch.get_num_threads(), torch.get_num_interop_threads()))
    torch.manual_seed(3)
    show("random", torch.rand(3).tolist())
    show("default", (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()))
    show("product", float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()))
    show("parallel", torch.__config__.parallel_info().split("ATen parallel")[0][:80])
    show("deterministic", torch.are_deterministic_algorithms_enabled())


if __name__ == "__main__":
    atexit.register(show, "atexit", "first registered, last run")
    for part in (show_main, show_sys, show_streams, show_process, show_python, show_torch):
        part()
    warnings.warn("a warning of the program", stacklevel=1)
    warnings.warn("one for whoever called it", stacklevel=2)
    logging.getLogger("mine").warning("a log line")
    print("on stderr", file=sys.stderr)
    traceback.print_stack()
