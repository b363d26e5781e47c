"""What a sandbox cluster is made of, and how its commands are run."""

import json
import os
import pwd
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FIRST_PORT, LAST_PORT = 17000, 32000
"""Below the ports that the kernel gives to clients (net.ipv4.ip_local_port_range: 32768 and up)."""
DESCRIPTION = "cluster.json"
PATIENCE = 60.0
"""Seconds that a daemon has to answer, and a command to end."""
SYSTEM_PATH = "/usr/sbin:/sbin"
"""Where the daemons are, which users' PATH often lacks."""


class SandboxError(Exception):
    """What happened, with the values, then the fix."""


def _size(default: int, least: int, words: str) -> Any:  # noqa: ANN401  # a dataclass's field
    """Return a field that is an option of `up`."""
    return field(default=default, metadata={"least": least, "help": words})


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that are slurmd processes of this machine."""

    folder: str
    """Where its files are; SLURM's names for it must not have blanks."""
    ports: tuple[int, ...]
    """slurmctld's, slurmdbd's, then one for each slurmd."""
    accounting: bool = True
    preempt_signal: bool = False
    """Whether a preempted job gets the signal that its --signal names (preempt_send_user_signal)."""
    cgroup: str = ""
    """The name of its group in each hierarchy of cgroups; empty where SLURM does without."""
    nodes: int = _size(4, 1, "nodes, called n0, n1, …")
    gpus: int = _size(2, 0, "GPUs of each node; nothing can compute on them")
    cpus: int = _size(16, 1, "threads of each node as SLURM counts them; two a core if a multiple of 4")
    memory: int = _size(16000, 1, "MiB of each node as SLURM counts them")
    kill_wait: int = _size(10, 1, "seconds from SIGTERM to SIGKILL (KillWait)")
    grace_time: int = _size(0, 0, "seconds that a job has which one of partition urgent preempts (GraceTime)")
    switches: int = _size(0, 0, "leaf switches, to which the nodes are dealt in turn; 0 is a network without")
    slurmd_timeout: int = _size(10, 3, "seconds until a silent node is DOWN (SlurmdTimeout)")

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' names."""
        return tuple(f"n{number}" for number in range(self.nodes))

    @property
    def parts(self) -> tuple[str, ...]:
        """What can be killed and started again."""
        return (*self.names, "slurmctld", *(("slurmdbd",) if self.accounting else ()))

    def path(self, *names: str) -> Path:
        """A file of the cluster."""
        return Path(self.folder, *names)

    @property
    def environ(self) -> dict[str, str]:
        """The environment of daemons and clients, with nothing of another cluster or job.

        MYSQL_UNIX_PORT tells slurmdbd's client library where MariaDB's socket is: it has no option for that.
        """
        foreign = ("SLURM", "SBATCH", "SRUN", "SALLOC")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        own = {"SLURM_CONF": self.path("slurm.conf"), "MYSQL_UNIX_PORT": self.path("mysql.socket")}
        path = f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PATH}"
        return {**clean, "PATH": path, **{name: str(value) for name, value in own.items()}}

    def run(self, *words: str) -> str:
        """Run a command and return its output; raises SandboxError with what it said."""
        shown = " ".join(words)
        try:
            done = subprocess.run(
                words,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SandboxError(f"{shown} did not end in {PATIENCE:.0f} s: see {self.folder}/log") from None
        except OSError as error:
            raise SandboxError(f"{shown}: {error.strerror}: slurm/sandbox install") from None
        if done.returncode:
            said = (done.stderr or done.stdout).strip()[-500:]
            raise SandboxError(f"{shown} failed with {done.returncode}: {said}")
        return done.stdout

    def answers(self, *words: str) -> bool:
        """Whether a command succeeds."""
        try:
            self.run(*words)
        except SandboxError:
            return False
        return True

    def wait_until(self, what: str, check: Callable[[], bool], patience: float = PATIENCE) -> None:
        """Poll until a condition holds; raises SandboxError after `patience` seconds."""
        end = time.monotonic() + patience
        while not check():
            if time.monotonic() > end:
                raise SandboxError(f"waited {patience:.0f} s for {what} in vain: see {self.folder}/log")
            time.sleep(0.05)

    def save(self) -> None:
        """Write down what the cluster is, for the other verbs."""
        self.path(DESCRIPTION).write_text(json.dumps(asdict(self)), encoding="utf-8")


def load_cluster(folder: Path) -> Cluster | None:
    """Return the cluster of a folder, None where there is none; raises SandboxError for someone else's."""
    path = folder / DESCRIPTION
    try:
        owner = folder.stat().st_uid
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SandboxError(f"{path} cannot be read ({error}): name another --folder") from None
    if owner != os.geteuid():
        raise SandboxError(f"{folder} is not yours, but user {owner}'s: name another --folder")
    return Cluster(**{**data, "folder": str(folder), "ports": tuple(data["ports"])})


def pick_ports(count: int) -> tuple[int, ...]:
    """Return ports at which nothing listens; raises SandboxError where there are not enough."""
    found: list[int] = []
    start = FIRST_PORT + os.getpid() % 900 * 16  # two that start at once seldom ask for the same
    for port in (*range(start, LAST_PORT), *range(FIRST_PORT, start)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return tuple(found)
    raise SandboxError(f"{count} ports needed, {len(found)} free from {FIRST_PORT} on: fewer --nodes")


def find_user() -> str:
    """Return the name of the user that this runs as, not of who logged in; raises SandboxError."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        user = os.geteuid()
        raise SandboxError(f"user {user} has no name, and SLURM needs one: add to /etc/passwd") from None


def tell(message: str) -> None:
    """Say what is being done, for what takes long."""
    print(f"sandbox: {message}", file=sys.stderr, flush=True)


def suggest(folder: object, *words: str) -> str:
    """Return the command line of a verb for a cluster."""
    return shlex.join(["slurm/sandbox", "--folder", str(folder), *words])
