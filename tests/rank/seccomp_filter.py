"""What containers do to system calls: a seccomp filter, installed between fork and exec."""

import ctypes
import os
import struct

CALLS = {
    "x86_64": {
        "sched_setaffinity": 203,
        "sched_getaffinity": 204,
        "set_mempolicy": 238,
        "get_mempolicy": 239,
        "prlimit64": 302,
    },
    "aarch64": {
        "sched_setaffinity": 122,
        "sched_getaffinity": 123,
        "set_mempolicy": 237,
        "get_mempolicy": 236,
        "prlimit64": 261,
    },
}
"""System call numbers by machine."""
KNOWN = os.uname().machine in CALLS
EPERM, ENOSYS = 1, 38
LOAD, EQUALS, RETURN, ALLOW, FAIL = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
"""BPF's operations as far as needed, and seccomp's answers (linux/seccomp.h)."""


def forbid(*names: str, error: int = EPERM) -> None:
    """Make system calls fail with an error in this process from now on, and after its exec."""
    numbers = [CALLS[os.uname().machine][name] for name in names]
    steps = [(LOAD, 0, 0, 0)]
    steps += [(EQUALS, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, FAIL | error)]
    buffer = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    for option, value in ((38, ctypes.c_ulong(1)), (22, ctypes.c_ulong(2))):
        if libc.prctl(option, value, ctypes.c_char_p(program) if option == 22 else zero, zero, zero):
            raise OSError(ctypes.get_errno(), "the filter cannot be installed")
