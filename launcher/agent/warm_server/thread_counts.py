"""Numbers of threads that libraries take from the environment as they are loaded, set again."""

import sys

from launcher.agent.start_method import THREADS, list_changes


def apply_thread_counts(before: dict[str, str], after: dict[str, str]) -> None:
    """Give torch and OpenBLAS the threads that they would take from these variables."""
    changed = [name for name in list_changes(before, after) if name in THREADS]
    count = after.get("MKL_NUM_THREADS") or after.get("OMP_NUM_THREADS") or ""
    if changed and count.isdecimal() and int(count):
        sys.modules["torch"].set_num_threads(int(count))
