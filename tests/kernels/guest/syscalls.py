"""System calls that Python has no name for."""

import ctypes
import os
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
POWER_OFF = 0x4321FEDC
"""LINUX_REBOOT_CMD_POWER_OFF, reboot(2)."""
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SECCOMP_MODE_FILTER = 2
REFUSE = 0x00050000 | 1
"""SECCOMP_RET_ERRNO with EPERM."""
ALLOW = 0x7FFF0000
MEMPOLICY_CALLS = (237, 238, 239)
"""mbind, set_mempolicy and get_mempolicy on x86_64."""


def mount(kind: str, target: str, options: str = "") -> None:
    """Mount a file system of this kind; the target is made where it is missing."""
    Path(target).mkdir(parents=True, exist_ok=True)
    check(LIBC.mount(b"none", target.encode(), kind.encode(), 0, options.encode()), f"mount {target}")


def power_off() -> None:
    """End the guest."""
    os.sync()
    check(LIBC.reboot(POWER_OFF), "reboot")


class Filter(ctypes.Structure):
    """struct sock_filter: one instruction of classic BPF."""

    _fields_ = (
        ("code", ctypes.c_uint16),
        ("true", ctypes.c_uint8),
        ("false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_uint16), ("filters", ctypes.POINTER(Filter)))


def refuse_mempolicy() -> None:
    """From here on the memory policy calls of this process and its children end with EPERM."""
    load, jump_if_equal, give_back = 0x20, 0x15, 0x06
    count = len(MEMPOLICY_CALLS)
    code = [Filter(load, 0, 0, 0)]
    code += [Filter(jump_if_equal, count - at, 0, call) for at, call in enumerate(MEMPOLICY_CALLS)]
    code += [Filter(give_back, 0, 0, ALLOW), Filter(give_back, 0, 0, REFUSE)]
    program = Program(len(code), (Filter * len(code))(*code))
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "PR_SET_SECCOMP")


def check(result: int, what: str) -> None:
    """Raise OSError for a call that failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
