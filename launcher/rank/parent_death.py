"""Ties a rank's life to its agent's."""

import ctypes

PR_SET_PDEATHSIG = 1
SIGTERM = 15


def end_with_agent() -> None:
    """Ask for SIGTERM when the agent dies, killed or not; it holds over exec (prctl(2)).

    A kernel that refuses leaves the rank to the agent's own shutdown.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(SIGTERM), 0, 0, 0)
