"""What is in the page cache, and bringing files into it by reading them."""

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterable, Iterator

from launcher.agent.read_order import ANY_SIZE, Read
from launcher.files import READ

CACHESTAT = 451
"""Number of cachestat(2) on all architectures, from Linux 6.5 on."""
PAGE = 4096
UNKNOWN = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM)
"""Errors by which the kernel does not tell."""


class CacheRange(ctypes.Structure):
    """`struct cachestat_range` of linux/mman.h."""

    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


def are_cached(reads: Iterable[Read]) -> bool | None:
    """Tell whether the first page of every read is in the page cache; None if the kernel does not tell.

    A file that is missing, or is another one by now, is passed over. Nothing is read; a disk is waited for
    only to open the files up to the first that is not cached.
    """
    known = None
    for read in reads:
        try:
            with open_for(read) as descriptor:
                known = is_page_cached(descriptor, read.offset)
        except OSError:
            continue
        if not known:
            return known
    return known


@contextlib.contextmanager
def open_for(read: Read) -> Iterator[int]:
    """Open the regular file of a read; raises OSError, also if it has another size than the read knows."""
    descriptor = os.open(read.path, READ)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or read.size not in (ANY_SIZE, status.st_size):
            raise OSError(errno.ESTALE, "not the file that was recorded", read.path)
        yield descriptor
    finally:
        os.close(descriptor)


def read_into_cache(read: Read, buffer: bytearray) -> int:
    """Read a part of a file, so that the kernel has it; returns the bytes. Raises OSError.

    By read(2), which waits: posix_fadvise and readahead(2) bring no more than a filesystem's own read-ahead
    at a time (128 KiB with FUSE, force_page_cache_ra in the kernel's mm/readahead.c).
    """
    with open_for(read) as descriptor:
        return os.preadv(descriptor, [memoryview(buffer)[: read.length]], read.offset)


def is_page_cached(descriptor: int, offset: int) -> bool | None:
    """Tell whether a page of a file is in the page cache; None if the kernel does not tell.

    preadv2 with RWF_NOWAIT knows it on the filesystems of local disks (EOPNOTSUPP on others), and cachestat
    on all, from Linux 6.5 on. mincore is not asked: for a file of another user it says that all is there.
    """
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNKNOWN:
            raise
        return ask_cachestat(descriptor, offset)
    return True


def ask_cachestat(descriptor: int, offset: int) -> bool | None:
    """Tell by cachestat(2) whether a page of a file is cached; None if the kernel does not tell."""
    part, found = CacheRange(offset, PAGE), (ctypes.c_uint64 * 5)()
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(CACHESTAT, descriptor, ctypes.byref(part), ctypes.byref(found), 0):
        return None
    return bool(found[0])
