"""What a rank's process gets beside its placement: signals, open files, a terminal, an end with its agent."""

import os

_signal = __import__("_signal")  # `signal` costs 4 ms
MIN_OPEN_FILES = 4096
"""Open files that are enough for batches of a few hundred tensors."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""


def restore_interrupt() -> None:
    """Let Ctrl-C end this process as it would end the program, without a traceback."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def ignore_signal(number: int) -> None:
    """Ignore a signal, over exec too, until the program has a handler for it."""
    _signal.signal(number, _signal.SIG_IGN)


def reset_signals(*, is_launched: bool) -> None:
    """Give the program the signals as it would have them without us; an ignored one stays ignored over exec.

    The interpreter ignores SIGPIPE at its start. `launch` has torchrun ignore the user signals, which SLURM
    sends to every process of a step, and blocks them itself; what has come until now is dropped.
    """
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
    if is_launched:
        user_signals = (_signal.SIGUSR1, _signal.SIGUSR2)
        for number in user_signals:
            ignore_signal(number)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, user_signals)
        for number in user_signals:
            _signal.signal(number, _signal.SIG_DFL)


def end_with_parent(parent: int) -> None:
    """Ask for SIGTERM when the parent dies, killed or not; it holds over exec (prctl(2)).

    `parent` is its PID; one that has died before is no parent any more, and this process ends. A kernel that
    refuses leaves the rank to the agent's own shutdown. Raises ImportError, OSError.
    """
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(_signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + _signal.SIGTERM)


def take_terminal(text: str) -> None:
    """Make a terminal this session's own, and lead the named streams to it: `0,1,2:/dev/pts/5`.

    Keys that are signals then go to this process's group. Raises ImportError, OSError and ValueError, and
    leaves the streams as they are.
    """
    from fcntl import ioctl
    from termios import TIOCSCTTY

    names, _, path = text.partition(":")
    streams = [int(name) for name in names.split(",")]
    terminal = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        ioctl(terminal, TIOCSCTTY, 0)
        for stream in streams:
            os.dup2(terminal, stream)
    finally:
        os.close(terminal)


def raise_open_files() -> str:
    """Raise the soft limit of open files to the hard one; return a message if that was refused.

    Each tensor that a DataLoader worker hands over holds one (PyTorch's notes on multiprocessing). NCCL
    raises the limit to the hard one too, in processes that use it.
    """
    try:
        from resource import RLIMIT_NOFILE, getrlimit, setrlimit

        soft, hard = getrlimit(RLIMIT_NOFILE)
    except (ImportError, OSError):
        return ""
    try:
        if soft != hard:
            setrlimit(RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        if 0 <= soft < MIN_OPEN_FILES:  # unlimited is -1
            return f"it may open {soft} files, and raising that to {hard} was refused ({error})"
    return ""
