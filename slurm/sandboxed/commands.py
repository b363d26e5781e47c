"""Runs a cluster's commands, and waits for what they start."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from sandboxed.cluster import Cluster
from sandboxed.errors import SandboxError
from sandboxed.packages import SYSTEM_PATH

PATIENCE = 60.0
"""Seconds that a daemon has to answer, and a command to end."""
FOREIGN = ("SLURM", "SBATCH", "SRUN", "SALLOC")
"""How the variables of another cluster or job begin."""


def tell(message: str) -> None:
    """Say what is being done, for what takes long."""
    sys.stderr.write(f"sandbox: {message}\n")
    sys.stderr.flush()


def environ_of(cluster: Cluster) -> dict[str, str]:
    """The environment of daemons and clients, with nothing of another cluster or job.

    MYSQL_UNIX_PORT tells slurmdbd's client library where MariaDB's socket is: it has no option for that.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    path = f"{os.environ.get('PATH', '/usr/bin:/bin')}:{SYSTEM_PATH}"
    return {
        **clean,
        "PATH": path,
        "SLURM_CONF": str(cluster.conf),
        "MYSQL_UNIX_PORT": cluster.path("mysql.socket"),
    }


def run(cluster: Cluster, words: Sequence[str]) -> str:
    """Run a command and return its output; raises SandboxError with what it said."""
    shown = " ".join(words)
    try:
        done = subprocess.run(
            words,
            env=environ_of(cluster),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SandboxError(f"{shown} did not end in {PATIENCE:.0f} s: see {cluster.folder}/log") from None
    except OSError as error:
        raise SandboxError(f"{shown}: {error.strerror}: slurm/sandbox install") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise SandboxError(f"{shown} failed with {done.returncode}: {said}")
    return done.stdout


def answers(cluster: Cluster, question: Sequence[str]) -> bool:
    """Whether a command succeeds."""
    try:
        run(cluster, question)
    except SandboxError:
        return False
    return True


def wait_until(what: str, check: Callable[[], bool], cluster: Cluster, patience: float = PATIENCE) -> None:
    """Poll until a condition holds; raises SandboxError after `patience` seconds."""
    end = time.monotonic() + patience
    while not check():
        if time.monotonic() > end:
            raise SandboxError(f"waited {patience:.0f} s for {what} in vain: see {cluster.folder}/log")
        time.sleep(0.05)
