"""Files and directories opened by descriptors: no waiting for pipes, no planted links, owners looked at.

Others can write to where runs are kept, or plant what a run is to be found at. So a directory is opened
first, and what is in it from there (openat(2)); what was opened is judged, and not its name, which may lead
elsewhere by then. The shim imports this, so it does with `os` and what that has loaded.
"""

import os
import stat
from errno import EFBIG, EINVAL, ELOOP, ENOTDIR, EPERM, ESRCH, ETIMEDOUT

READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
ON_THE_WAY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
"""For a directory in which something is to be opened, and that this user may perhaps not list."""
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
AnyPath = str | os.PathLike[str]
CHUNK = 1 << 20
PATIENCE = 10.0
"""Seconds after which a pipe that the user has named, and from which nothing came, is given up."""
LARGEST = 64 << 20
"""Bytes of a file of ours at most; the plan of the largest machine has less than one MiB."""
FEWEST_FIELDS = 50
"""Of /proc/PID/stat from the third on: since Linux 3.5 there are 52 in all."""


class Descriptor(int):
    """An open file or directory, which a `with` block closes in the end."""

    __slots__ = ()

    def __enter__(self) -> int:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self)


def open_directory(path: AnyPath, *, at: int | None = None, flags: int = DIRECTORY) -> Descriptor:
    """Open a directory; a symbolic link at its end is followed if this user or root made it.

    People keep runs on another filesystem by such a link. Links on the way are the kernel's to judge
    (fs.protected_symlinks of proc(5)). Raises OSError.
    """
    try:
        return Descriptor(os.open(path, flags | os.O_NOFOLLOW, dir_fd=at))
    except OSError as error:
        if error.errno not in (ELOOP, ENOTDIR):
            raise
    link = os.stat(path, dir_fd=at, follow_symlinks=False)
    if is_planted(link):
        owner = name_user(link.st_uid)
        raise PermissionError(EPERM, f"a symbolic link of {owner}, who can have it lead anywhere", str(path))
    return Descriptor(os.open(path, flags, dir_fd=at))


def is_planted(status: os.stat_result) -> bool:
    """Tell whether this is a symbolic link that another user has made, root aside."""
    return stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0)


def open_own(path: AnyPath, *, at: int | None = None) -> Descriptor:
    """Open a directory that is this user's or root's, links as `open_directory` has them; raises OSError."""
    return _check(open_directory(path, at=at), str(path))


def open_below(path: AnyPath, *names: str) -> Descriptor:
    """Open a directory within a run's, made for its owner alone if it does not exist; raises OSError."""
    found = open_own(path)
    for name in names:
        with found as at:
            found = make_inner(at, name)
    return found


def open_inner(at: int, name: str) -> Descriptor:
    """Open a directory within an open one, whose links are not followed; raises OSError."""
    try:
        return _check(os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=at), name)
    except OSError as error:
        if error.errno in (ELOOP, ENOTDIR) and stat.S_ISLNK(os.lstat(name, dir_fd=at).st_mode):
            raise OSError(ELOOP, "a symbolic link, which a run directory cannot have there", name) from None
        raise


def make_inner(at: int, name: str) -> Descriptor:
    """Open a directory within an open one, made for its owner alone if it is missing; raises OSError."""
    try:  # noqa: SIM105 - contextlib costs each rank's start a millisecond
        os.mkdir(name, 0o700, dir_fd=at)
    except FileExistsError:
        pass
    return open_inner(at, name)


def _check(
    descriptor: int, name: str, folder: int | None = None, *, own: bool = True, regular: bool = False
) -> Descriptor:
    """Return a descriptor that is this user's or root's, or a regular file; else close it; raises OSError.

    Filesystems can show all that somebody makes as another user's (NFS with root_squash or all_squash, EFS
    access points): there, what is made here now tells who this user is. `folder` is the open directory of a
    file; a directory is its own.
    """
    try:
        status = os.fstat(descriptor)
        if regular and not stat.S_ISREG(status.st_mode):
            raise OSError(EINVAL, "no regular file", name)
        is_own = status.st_uid in (os.geteuid(), 0)
        if own and not is_own and status.st_uid != find_shown_uid(descriptor if folder is None else folder):
            raise PermissionError(EPERM, f"it belongs to {name_user(status.st_uid)}", name)
    except OSError:
        os.close(descriptor)
        raise
    return Descriptor(descriptor)


def find_shown_uid(at: int) -> int | None:
    """Return the owner of what this process makes in a directory; None if it can make nothing there."""
    name, flags = f".launch-{os.urandom(8).hex()}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with Descriptor(os.open(name, flags, 0o600, dir_fd=at)) as descriptor:
            os.unlink(name, dir_fd=at)
            return os.fstat(descriptor).st_uid
    except OSError:
        return None


def name_user(uid: int) -> str:
    """Return a user for people: `user bob (uid 1004)`, or `uid 1004`."""
    try:
        from pwd import getpwuid  # it can take a question to a directory service

        return f"user {getpwuid(uid).pw_name} (uid {uid})"
    except (ImportError, KeyError):
        return f"uid {uid}"


def open_file(path: AnyPath, *, at: int | None = None, follow: bool = False, own: bool = False) -> Descriptor:
    """Open a regular file to read, and nothing else, which could hang or never end; raises OSError.

    With `own`, only one of this user's or root's.
    """
    # A device may act on being opened.
    if not stat.S_ISREG(os.stat(path, dir_fd=at, follow_symlinks=follow).st_mode):
        raise OSError(EINVAL, "no regular file", str(path))
    descriptor = os.open(path, READ if follow else READ | os.O_NOFOLLOW, dir_fd=at)
    if at is not None or not own:
        return _check(descriptor, str(path), at, own=own, regular=True)
    with Descriptor(os.open(os.path.dirname(os.path.abspath(path)), ON_THE_WAY)) as folder:
        return _check(descriptor, str(path), folder, regular=True)


def read_file(
    path: AnyPath, most: int, *, at: int | None = None, follow: bool = False, own: bool = False
) -> bytes:
    """Return the bytes of a file that has `most` at most; see `open_file`. Raises OSError."""
    with open_file(path, at=at, follow=follow, own=own) as descriptor:
        return read_bounded(descriptor, most, str(path))


def read_bounded(descriptor: int, most: int, name: str) -> bytes:
    """Return what is left in a descriptor; raises OSError if that is more than `most` bytes."""
    data, size = bytearray(), f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
    is_large = os.fstat(descriptor).st_size > most  # nothing of it is read
    while not is_large and (part := os.read(descriptor, min(CHUNK, most + 1 - len(data)))):
        data += part
        is_large = len(data) > most
    if is_large:
        raise OSError(EFBIG, f"more than {size}", name)
    return bytes(data)


def read_input(path: AnyPath, most: int) -> bytes:
    """Return the bytes of what a user has named: a file, or a pipe as of `<(command)`; raises OSError."""
    with Descriptor(os.open(path, READ)) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            from select import select

            if not select([descriptor], [], [], PATIENCE)[0]:
                raise TimeoutError(ETIMEDOUT, f"nothing came from it in {PATIENCE:g} s", str(path))
        os.set_blocking(descriptor, True)
        return read_bounded(descriptor, most, str(path))


def open_append(at: int, name: str) -> Descriptor:
    """Open a regular file of this user's in an open directory, to append to; raises OSError.

    It is made for its owner alone. What is written to another user's file could be read by that user.
    """
    found = _check(os.open(name, APPEND | os.O_NOFOLLOW, 0o600, dir_fd=at), name, at, regular=True)
    os.set_blocking(found, True)
    return found


def write_whole(at: int, name: str, data: bytes, *, private: bool = True, sync: bool = False) -> None:
    """Write a file in an open directory, whole or not at all; raises OSError.

    With `private` it is for its owner alone; else it has the mode of the file that it replaces, or of any new
    file. With `sync` it is on the disk before it gets its name.
    """
    draft = f".launch-{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        mode = os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
    except FileNotFoundError:
        mode = 0
    if mode and not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
        raise OSError(EINVAL, "it is no regular file, which alone may be replaced", name)
    try:
        with os.fdopen(os.open(draft, flags, 0o600 if private else 0o666, dir_fd=at), "wb") as file:
            if not private and stat.S_ISREG(mode):
                os.fchmod(file.fileno(), stat.S_IMODE(mode) & 0o777)
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, name, src_dir_fd=at, dst_dir_fd=at)
    except OSError as error:
        remove(at, draft)
        raise OSError(error.errno, error.strerror, name) from None


def remove(at: int, name: str) -> None:
    """Remove a file from an open directory if it exists."""
    try:
        os.unlink(name, dir_fd=at)
    except OSError:
        return


def read_signals(pid: int | str, name: str) -> int | None:
    """Return a set of signals of /proc/PID/status, as `SigCgt` (proc(5)); None if it is not shown.

    Signal n is bit n - 1.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file.read().splitlines())
        return int(lines[name.encode()], 16)
    except (OSError, ValueError, KeyError):
        return None


def read_stat(pid: int | str) -> tuple[str, list[str]]:
    """Return a process's name and its fields of /proc/PID/stat from the third on, the state (proc(5)).

    Field n of proc(5) has index n - 3. Raises OSError, also for what is not as proc(5) has it.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        head, _, tail = file.read().decode("utf-8", "replace").rpartition(")")
    fields = tail.split()
    if len(fields) < FEWEST_FIELDS:
        raise ProcessLookupError(ESRCH, "not as proc(5) has it", f"/proc/{pid}/stat")
    return head.partition("(")[2], fields
