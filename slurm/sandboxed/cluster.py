"""What a sandbox cluster is made of."""

import json
import os
import pwd
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from sandboxed.errors import SandboxError

FIRST_PORT, LAST_PORT = 17000, 32000
"""Below the ports that the kernel gives to clients (net.ipv4.ip_local_port_range: 32768 and up)."""
DESCRIPTION = "cluster.json"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes that are slurmd processes of this machine."""

    folder: str
    """Where its files are; SLURM's names for it must not have blanks."""
    nodes: int
    gpus: int
    """GPUs of each node as SLURM counts them; nothing can compute on them."""
    cpus: int
    """Threads of each node as SLURM counts them.

    A multiple of 4 is two sockets of cores with two threads each; another number one socket of cores.
    """
    memory_mib: int
    accounting: bool
    kill_wait: int
    """Seconds from SIGTERM to SIGKILL (slurm.conf's KillWait)."""
    ports: tuple[int, ...]
    """slurmctld's, slurmdbd's, then one for each slurmd."""
    grace_time: int = 0
    """Seconds that a preempted job of `main` has (its GraceTime)."""
    preempt_signal: bool = False
    """Whether a preempted job gets the signal that its --signal names (preempt_send_user_signal)."""
    slurmd_timeout: int = 10
    """Seconds until a silent node is DOWN (SlurmdTimeout)."""
    switches: int = 0
    """Leaf switches below one at the top, to which the nodes are dealt in turn; 0 is no topology.conf."""
    cgroup: str = ""
    """The name of its group in each hierarchy of cgroups; empty where SLURM does without."""

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' names."""
        return tuple(f"n{number}" for number in range(self.nodes))

    @property
    def conf(self) -> Path:
        """Its slurm.conf, for the variable SLURM_CONF."""
        return Path(self.folder, "slurm.conf")

    @property
    def cgroups(self) -> str:
        """Where its groups are, a directory for each controller (cgroup.conf's CgroupMountpoint)."""
        return self.path("cgroup")

    def path(self, name: str) -> str:
        """A file of the cluster."""
        return f"{self.folder}/{name}"


def find_user() -> str:
    """Return the name of the user that this runs as, not of who logged in; raises SandboxError."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise SandboxError(
            f"user {os.geteuid()} has no name, and SLURM needs one: add to /etc/passwd"
        ) from None


def default_folder() -> Path:
    """A folder for each user, with a short path, since a munge socket's must be; `up` makes it, mode 0700."""
    return Path(f"/tmp/launch-sandbox-{os.geteuid()}")  # noqa: S108  # never taken over from someone else


def save_cluster(cluster: Cluster) -> None:
    """Write down what the cluster is, for the other verbs."""
    Path(cluster.folder, DESCRIPTION).write_text(json.dumps(asdict(cluster)), encoding="utf-8")


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
    """Free ports; raises SandboxError where there are not enough."""
    found: list[int] = []
    start = FIRST_PORT + os.getpid() % 900 * 16  # two that start at once seldom ask for the same
    for port in (*range(start, LAST_PORT), *range(FIRST_PORT, start)):
        if is_free(port):
            found.append(port)
        if len(found) == count:
            return tuple(found)
    raise SandboxError(
        f"{count} ports needed, {len(found)} free in {FIRST_PORT} to {LAST_PORT}: fewer --nodes"
    )


def is_free(port: int) -> bool:
    """Whether nothing listens on a port, at whatever address."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
