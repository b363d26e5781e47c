"""Threads of a rank's process, and of its compiler."""

from collections.abc import Mapping

from launcher.plan.cores import Cores
from launcher.plan.environment import VariablesAndNotes, read_variable_count

FOLLOWERS = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables of libraries that take OMP_NUM_THREADS where they have none of their own.

They are set all the same: torch takes MKL's number for its own where it is built with MKL, so that a leftover
would win, and NumExpr fails to load where OMP_NUM_THREADS is a list (`8,4`), or above its most.
"""
MOST_NUMEXPR = 64
"""NUMEXPR_MAX_THREADS where it is not set (NumExpr's user guide)."""
MOST_COMPILERS = 32
"""Inductor's own most (torch/_inductor/config.py, `decide_compile_threads`)."""


def set_threads(environ: Mapping[str, str], workers: int, cores: Cores) -> tuple[int, VariablesAndNotes]:
    """The threads of a rank's libraries and its compiler's processes; the user's number where there is one.

    A user's OMP_NUM_THREADS is that of the others as well: torch would take MKL's number instead. A user's
    MKL_NUM_THREADS alone is for MKL.
    """
    threads = read_variable_count(environ, "OMP_NUM_THREADS", 1) or count_threads(workers, cores)
    env = dict.fromkeys(("OMP_NUM_THREADS", *FOLLOWERS), str(threads))
    most = read_variable_count(environ, "NUMEXPR_MAX_THREADS", 1) or MOST_NUMEXPR
    env["NUMEXPR_NUM_THREADS"] = str(min(threads, most))
    env["TORCHINDUCTOR_COMPILE_THREADS"] = str(count_compilers(cores))
    return threads, (env, ())


def count_threads(workers: int, cores: Cores) -> int:
    """The rank's own cores, less those that workers need beyond the spare ones; at least one."""
    return max(1, int(cores.own + 1e-6) - max(0, workers - int(cores.spare + 1e-6)))


def count_compilers(cores: Cores) -> int:
    """Processes of Inductor: one for each hardware thread of the rank's, within its own most.

    Left alone, it counts the affinity, which ranks that share their CPUs have as a whole
    (github.com/pytorch/pytorch/issues/190941).
    """
    return max(1, min(MOST_COMPILERS, int(cores.cpus + 1e-6)))
