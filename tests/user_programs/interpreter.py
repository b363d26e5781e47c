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
import re
import resource
import signal
import sys
import threading
import time
import traceback
import warnings

import torch

OURS = re.compile(
    "LAUNCH|TORCHELASTIC|TORCH_NCCL|TORCH_FR|TORCH_ELASTIC|ROLE_|GROUP_|PYTORCH_ALLOC|PYTORCH_CUDA_ALLOC|CUDA_DEVICE_ORDER$"
    "|CUDA_MODULE_LOADING$|PYTHONPATH$|MASTER_|TRITON_CACHE_DIR$|TORCHINDUCTOR_|TORCH_INCLUDE_ONLY_ACTIVE$|LC_CTYPE$|.*_NUM_THREADS$"
)
"""Variables that a start sets, and an interpreter started by hand does not have."""


class Point:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return type(other) is Point and other.x == self.x

    __hash__ = None


def show(name, *values):
    print(f"{name}: {', '.join(map(repr, values))}")


def show_attributes(found, names):
    for name in names.split():
        value = getattr(found, name, "none")
        show(name, value() if callable(value) else value)


def show_main():
    main = sys.modules["__main__"]
    show("names of __main__", sorted(name for name in vars(main) if name.startswith("__")))
    show_attributes(main, "__name__ __file__ __package__ __cached__")
    show("__spec__", getattr(main.__spec__, "name", main.__spec__))
    show("__loader__", type(getattr(main, "__loader__", None)).__name__)
    show("__builtins__", main.__builtins__ is builtins)
    show("__doc__", (__doc__ or "")[:20])
    point = pickle.loads(pickle.dumps(Point(3)))
    show("pickle", point == Point(3), Point.__module__)
    try:
        show("source", inspect.getsource(Point.__init__))
    except (OSError, TypeError) as error:
        show("source", error)
    show("linecache", len(linecache.getlines(__file__)) if "__file__" in globals() else None)


def show_sys():
    show_attributes(
        sys, "argv path flags executable prefix dont_write_bytecode warnoptions orig_argv _xoptions"
    )
    show_attributes(sys, "gettrace getprofile getrecursionlimit getswitchinterval get_int_max_str_digits")
    show_attributes(sys, "getdefaultencoding getfilesystemencoding getfilesystemencodeerrors")
    line = open("/proc/self/cmdline", "rb").read().split(b"\0") if "PROBE_CMDLINE" in os.environ else 0
    show("process", line, open("/proc/self/comm").read(), os.readlink("/proc/self/exe"))
    finders = [found for found in sys.meta_path if type(found).__name__ != "ImportWatcher"]
    show("meta_path", [getattr(found, "__name__", type(found).__name__) for found in finders])
    show("path_hooks", len(sys.path_hooks))
    show("hooks", sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__)
    show("unraisablehook", sys.unraisablehook is sys.__unraisablehook__)
    show("threading.excepthook", threading.excepthook is threading.__excepthook__)
    show("ours", sorted(name for name in sys.modules if name.partition(".")[0] in ("launcher",)))
    heavy = {"pdb", "cProfile", "torch._dynamo", "unittest.mock", "hydra", "sitecustomize"}
    show("loaded", sorted(heavy & set(sys.modules)))


def show_streams():
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        show(name, type(stream).__name__, type(stream.buffer), type(getattr(stream.buffer, "raw", None)))
        show_attributes(
            stream, "name mode encoding errors line_buffering write_through newlines isatty fileno"
        )
        show("original", stream is getattr(sys, f"__{name}__"))
    show("locale", locale.getlocale(), locale.getpreferredencoding(), locale.setlocale(locale.LC_ALL))
    show("codecs", io.DEFAULT_BUFFER_SIZE, codecs.lookup("utf-8").name)
    print("žluťoučký kůň 馬")


def is_inherited(number):
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


def show_process():
    show("cwd", os.getcwd(), os.umask(0o22), os.nice(0))
    show("leader of group and session", os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid())
    show("inherited descriptors", [number for number in range(100) if is_inherited(number)])
    main = threading.main_thread()
    show("main thread", main is threading.current_thread(), main.native_id == os.getpid(), main.name)
    show("threads", threading.active_count())
    show("children", open(f"/proc/self/task/{os.getpid()}/children").read())
    for number in sorted(signal.valid_signals() - {9, 19} - set(range(32, 99))):
        if signal.getsignal(number) is not signal.SIG_DFL:
            show(signal.Signals(number).name, str(signal.getsignal(number)).split(" at ")[0])
    show("blocked", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    masks = [line.split() for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn"))]
    show("masks", [(name, hex(int(mask, 16) & 0x7FFFFFFF)) for name, mask in masks])
    show("limits", [resource.getrlimit(number) for number in (resource.RLIMIT_CORE, resource.RLIMIT_STACK)])
    show("faulthandler", faulthandler.is_enabled(), signal.getitimer(signal.ITIMER_REAL), time.tzname)


def show_python():
    show_attributes(gc, "isenabled get_threshold get_debug")
    show("gc", len(gc.callbacks), len(gc.garbage))
    show("gc sees a class of torch", any(found is torch.nn.Module for found in gc.get_objects()))
    for kind, text, category, module, line in warnings.filters:
        patterns = [getattr(found, "pattern", found) for found in (text, module)]
        show("filter", kind, *patterns, category.__name__, line)
    root = logging.getLogger()
    show("logging", root.level, root.handlers, logging.getLogger("torch").level)
    show("loggers", sorted(logging.root.manager.loggerDict)[:3])
    show("stack", [frame.name for frame in traceback.extract_stack()])
    process = multiprocessing.current_process()
    show("multiprocessing", process.name, multiprocessing.parent_process(), len(process.authkey))
    show("start method", multiprocessing.get_start_method(allow_none=True))
    show("variables", [name for name in sorted(os.environ) if not OURS.match(name)])
    show("hash", hash("text") if "PYTHONHASHSEED" in os.environ else None)


def show_torch():
    torch.manual_seed(3)
    show("random", torch.rand(3).tolist(), float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()))
    show_attributes(torch, "get_num_threads get_num_interop_threads get_default_dtype get_default_device")
    show_attributes(torch, "is_grad_enabled are_deterministic_algorithms_enabled")
    show("parallel", torch.__config__.parallel_info().split("ATen parallel")[0][:80])


if __name__ == "__main__":
    atexit.register(show, "atexit", "first registered, last run")
    for part in (show_main, show_sys, show_streams, show_process, show_python, show_torch):
        part()
    warnings.warn("a warning of the program", stacklevel=1)
    warnings.warn("one for whoever called it", stacklevel=2)
    logging.getLogger("mine").warning("a log line")
    print("on stderr", file=sys.stderr)
    traceback.print_stack()
