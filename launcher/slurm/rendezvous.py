"""Where the nodes of a job meet: a port that is this job's own on the first of its nodes."""

from launcher.agent.endpoint import list_ports

STRIDE, TRIAL, RESTART = 7919, 1009, 101
"""Primes, so that neighbouring jobs, the candidates of one job, and its attempts are far from each other."""
TRIALS = 5
"""Candidates that are tried; each costs a step."""

PORT_TAKEN = 199
"""Exit code of a task whose host cannot serve the rendezvous at the port that was chosen."""


def pick_port(job_id: int, attempt: int, trial: int, local: tuple[int, int]) -> int:
    """Return a candidate: outside of the kernel's own ports, another one for every job that may share a node.

    All of SLURM's jobs of some 20,000 in a row have different ones. If the kernel leaves no range that is
    worth the name, ports from LOWEST on are taken all the same.
    """
    ports = list_ports(*local)
    return ports[(job_id * STRIDE + attempt * RESTART + trial * TRIAL) % len(ports)]


def pick_restart_port(job_id: int, attempt: int, trial: int, local: tuple[int, int], restart: int) -> int:
    """Return the port of a start: that of `pick_port` for the first one, and others for those after it."""
    return pick_port(job_id, attempt, trial + TRIALS * restart, local)
