"""What PyTorch's compilers keep for a job, on each node's own disk: network filesystems fail them."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping

PLACES = ("SLURM_TMPDIR", "TMPDIR")
"""Variables that name a disk of the node's own, the first that will do winning; /tmp is the last."""
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""Variables by which a user says where the caches are."""


@contextlib.contextmanager
def open_caches(environ: Mapping[str, str]) -> Iterator[str]:
    """Give a new folder on this node, for its owner alone, that is removed in the end.

    Empty where the user has said where the caches are, and where no disk will do: the compilers' own places
    are better than no job.
    """
    folder = "" if all(environ.get(name) for name in CACHES) else make_folder(environ)
    try:
        yield folder
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def make_folder(environ: Mapping[str, str]) -> str:
    """Make a folder of mode 0700 that libraries can be loaded from; empty where there is no place for it."""
    prefix = f"launch-{environ.get('SLURM_JOB_ID', 'job')}-"
    for place in (*filter(None, map(environ.get, PLACES)), "/tmp"):  # noqa: S108 - mkdtemp's names are not foreseen
        with contextlib.suppress(OSError, ValueError):
            if not os.statvfs(place).f_flag & os.ST_NOEXEC:
                return tempfile.mkdtemp(prefix=prefix, dir=os.path.abspath(place))  # noqa: PTH100 - a text is wanted
    return ""
