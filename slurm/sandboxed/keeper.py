"""Starts a node's slurmd, and stays above all that comes of it: orphans come here and not to init.

A process of its own for each node, `python -I -S keeper.py FOLDER NODE slurmd …`, which ends once nothing of
the node is left. So a node's processes are found whatever they did with their environment and session.
"""

import ctypes
import os
import sys

PR_SET_CHILD_SUBREAPER = 36


def main(words: list[str]) -> None:
    """Run a command, report how it ended on stdout, and collect what it leaves until nothing is left."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    child = os.posix_spawnp(words[0], words, os.environ)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(1, f"{code}\n".encode())
    os.chdir("/")
    devnull = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(devnull, standard)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(sys.argv[3:])
