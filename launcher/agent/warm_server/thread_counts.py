"""Numbers of threads that libraries take from the environment as they are loaded, set again in a rank.

Nothing here starts a thread that a program by itself would not have after its imports.
"""

import ctypes
import os
import sys
from collections.abc import Mapping

from launcher.agent.python_program import ExecNeededError
from launcher.agent.start_method import THREADS, list_changed_variables
from launcher.agent.warm_server.fork_state import list_mapped_files

TORCH_THREADS, BLAS_THREADS = THREADS[:2], THREADS[2:]
INIT_THREADS = "_ZN2at16init_num_threadsEv"
"""`at::init_num_threads()`, which `torch._C` calls as it is loaded: OpenMP's number for the main thread is
MKL's, or what the environment says in builds without MKL (ATen/ParallelOpenMP.cpp)."""
MKL_SET_THREADS = "mkl_serv_domain_set_num_threads"
"""What MKL calls with the number from the environment; it takes no more than the cores for its own."""
MKL_ALL_DOMAINS = 0
BLAS_SET_THREADS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "")
)
"""Names of OpenBLAS's function in NumPy's, SciPy's and other builds."""


def apply_thread_counts(before: Mapping[str, str], after: Mapping[str, str], cpus: int) -> None:
    """Give torch and OpenBLAS the threads that they would take from a rank's variables (`after`).

    `before` are the warm process's, and `cpus` is how many CPUs that may use. Raises ExecNeededError if
    a number cannot be set.
    """
    allowed = len(os.sched_getaffinity(0))
    changed = [name for name in list_changed_variables(dict(before), dict(after)) if name in TORCH_THREADS]
    if changed or (allowed != cpus and not any(after.get(name) for name in TORCH_THREADS)):
        set_torch_threads(read_thread_count(after, TORCH_THREADS[::-1]))
    numbers = [
        read_thread_count(after, (name,)) for name in (*BLAS_THREADS, TORCH_THREADS[0]) if after.get(name)
    ]
    set_blas_threads(min(numbers[0] if numbers else allowed, allowed))


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


def set_blas_threads(count: int) -> None:
    """Set the threads of every OpenBLAS; it was loaded with one, so that none was started before the fork."""
    paths = [path for path in list_mapped_files() if "openblas" in os.path.basename(path)]
    for path in paths if count > 1 else ():
        library = ctypes.CDLL(path)
        functions = (getattr(library, name, None) for name in BLAS_SET_THREADS)
        for function in filter(None, functions):
            function(count)
            break
