"""What PyTorch's compilers keep for a job, on each node's own disk: network filesystems fail them."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping

DISK_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
"""Variables that name a disk of the node's own, the first that will do winning; /tmp is the last."""
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""Variables by which a user says where the caches are."""
PREFIX = f"launch-caches-{os.uname().nodename}-"
"""How the names of this node's folders begin; a disk that several nodes share may know no lock but each
node's own."""


@contextlib.contextmanager
def open_caches(environ: Mapping[str, str]) -> Iterator[str]:
    """Give a new folder on this node, for its owner alone, that is removed in the end.

    It is of mode 0700, and libraries can be loaded from it. Empty if the user has said where the caches are,
    or if no disk will do: the compilers' own places are better than no job. What a task that was killed has
    left is removed by the next one.
    """
    folder, lock = "", None
    prefix = f".{PREFIX}{environ.get('SLURM_JOB_ID', 'job')}-"
    for disk in () if all(environ.get(name) for name in CACHES) else list_disks(environ):
        with contextlib.suppress(OSError, ValueError):
            if not os.statvfs(disk).f_flag & os.ST_NOEXEC:
                remove_leftovers(disk)
                made = tempfile.mkdtemp(prefix=prefix, dir=disk)
                lock = lock_folder(made)
                named = os.path.join(disk, os.path.basename(made)[1:])  # noqa: PTH118, PTH119 - texts
                os.rename(made, named)  # noqa: PTH104 - by this name it is locked
                folder = named
                break
    try:
        yield folder
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def list_disks(environ: Mapping[str, str]) -> list[str]:
    """Return the disks of this node that may do."""
    found = (*filter(None, map(environ.get, DISK_VARIABLES)), "/tmp")  # noqa: S108 - mkdtemp's names are not foreseen
    return [os.path.abspath(disk) for disk in found]  # noqa: PTH100 - a text is wanted


def lock_folder(folder: str) -> int | None:
    """Return a descriptor that keeps `remove_leftovers` off a folder until closed; None without locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_leftovers(disk: str) -> None:
    """Remove this user's folders in a place whose tasks were killed: the kernel has let go of their locks."""
    with contextlib.suppress(OSError), os.scandir(disk) as entries:
        for entry in entries:
            if not entry.name.startswith(PREFIX):
                continue
            with contextlib.suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                    continue
                if (lock := lock_folder(entry.path)) is not None:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(lock)
