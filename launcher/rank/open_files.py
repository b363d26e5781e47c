"""How many files a rank may open: as many as it can be given."""

LEAST = 4096
"""What is enough for batches of a few hundred tensors."""


def raise_files() -> str:
    """Raise the soft limit of open files to the hard one; return what to tell where that was refused.

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
        if 0 <= soft < LEAST:  # unlimited is -1
            return f"it may open {soft} files, and raising that to {hard} was refused ({error})"
    return ""
