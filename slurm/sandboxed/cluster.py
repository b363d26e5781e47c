"""What a sandbox cluster is made of."""

import getpass
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from sandboxed.errors import SandboxError

FIRST_PORT, LAST_PORT = 17000, 32000
"""Below the ports that the kernel gives to clients (net.ipv4.ip_local_port_range: 32768 and up)."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that are slurmd processes of this machine."""

    folder: str
    """Where its files are; SLURM's names for it must not have blanks."""
    nodes: int
    gpus: int
    """GPUs of each node as SLURM counts them; nothing can compute on them."""
    cpus: int
    """Threads of each node as SLURM counts them: two sockets, two threads a core."""
    memory_mib: int
    accounting: bool
    kill_wait: int
    """Seconds from SIGTERM to SIGKILL (slurm.conf's KillWait)."""
    ports: tuple[int, ...]
    """slurmctld's, slurmdbd's, MariaDB's, then one for each slurmd."""

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' names."""
        return tuple(f"n{number}" for number in range(self.nodes))

    @property
    def conf(self) -> Path:
        """Its slurm.conf, for the variable SLURM_CONF."""
        return Path(self.folder, "slurm.conf")

    def path(self, name: str) -> str:
        """A file of the cluster."""
        return f"{self.folder}/{name}"


def default_folder() -> Path:
    """A folder for each user, since a munge socket's path must be short."""
    return Path(f"/tmp/launch-sandbox-{getpass.getuser()}")


def save_cluster(cluster: Cluster) -> None:
    """Write down what the cluster is, for `down` and `status`."""
    Path(cluster.folder, "cluster.json").write_text(json.dumps(asdict(cluster)), encoding="utf-8")


def load_cluster(folder: Path) -> Cluster | None:
    """The cluster of a folder; None where there is none."""
    try:
        data = json.loads((folder / "cluster.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Cluster(**{**data, "ports": tuple(data["ports"])})


def pick_ports(count: int) -> tuple[int, ...]:
    """Free ports; raises SandboxError where there are not enough."""
    found: list[int] = []
    start = FIRST_PORT + os.getpid() % 1000 * 10
    for port in (*range(start, LAST_PORT), *range(FIRST_PORT, start)):
        if is_free(port):
            found.append(port)
        if len(found) == count:
            return tuple(found)
    raise SandboxError(f"there are no {count} free ports between {FIRST_PORT} and {LAST_PORT}: stop something")


def is_free(port: int) -> bool:
    """Whether nothing listens on a port."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
