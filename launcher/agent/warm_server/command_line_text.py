"""What /proc/PID/cmdline and environ show of a forked rank: its own, as after exec."""

import ctypes
import os
from collections.abc import Mapping, Sequence

from launcher.agent.warm_server.fork_state import read_proc_lines

PR_SET_MM, PR_SET_MM_MAP = 35, 14
STAT_FIELDS = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
}
"""Fields of /proc/self/stat (proc(5), counted from 1)."""


class MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack")),
        *((name, ctypes.c_uint64) for name in ("arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_int32),
    )


def show_command_line(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have the kernel show a command line and variables for this process.

    A kernel without CONFIG_CHECKPOINT_RESTORE refuses, and goes on to show the warm process's.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    libc = ctypes.CDLL(None)
    size = len(words) + len(variables) + 1
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    text = libc.malloc(ctypes.c_size_t(size))  # for as long as the process lives
    stat = " ".join(read_proc_lines("/proc/self/stat")).rpartition(")")[2].split()
    if not text or len(stat) < max(STAT_FIELDS.values()):
        return
    ctypes.memmove(text, words + variables, size - 1)
    fields = {name: int(stat[number - 3]) for name, number in STAT_FIELDS.items()}
    ends = (text, text + len(words), text + len(words), text + size - 1)
    areas = dict(zip(("arg_start", "arg_end", "env_start", "env_end"), ends, strict=True))
    memory = MemoryMap(**fields, **areas, brk=libc.sbrk(ctypes.c_ssize_t(0)), exe_fd=-1)
    libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(memory), ctypes.c_ulong(ctypes.sizeof(memory)), 0)
