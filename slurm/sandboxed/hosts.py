"""The nodes' names in /etc/hosts: the programs of a job meet on the first node by its name."""

import fcntl
import os
import shlex
import socket
from pathlib import Path

from sandboxed.cluster import Cluster
from sandboxed.commands import tell

HOSTS = Path("/etc/hosts")


def mark_of(cluster: Cluster) -> str:
    """What ends the cluster's line."""
    return f"# sandbox {cluster.folder}"


def add_names(cluster: Cluster) -> None:
    """Add a line of the cluster's own, also where another's has the same names; say where that is forbidden.

    This machine's name is among them where it is unknown: SLURM's clients are called back by it.
    """
    host = socket.gethostname()
    names = [*cluster.names, *([] if resolves(host) else [host])]
    line = f"127.0.0.1 {' '.join(names)} {mark_of(cluster)}"
    if os.access(HOSTS, os.W_OK):
        with HOSTS.open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read()
            file.write(f"{'' if text.endswith(chr(10)) or not text else chr(10)}{line}\n")
    elif not all(map(resolves, names)):
        command = f"echo {shlex.quote(line)} | sudo tee -a {HOSTS}"
        tell(f"torchrun finds no node by its name, since {HOSTS} is not yours to write: {command}")


def drop_names(cluster: Cluster) -> None:
    """Take the cluster's line out again.

    Written in place: in a container /etc/hosts is a mount and cannot be replaced. It is cut last, so that
    who reads it meanwhile finds every other name.
    """
    if not os.access(HOSTS, os.W_OK):
        return
    with HOSTS.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.readlines()
        kept = [line for line in lines if not line.rstrip().endswith(mark_of(cluster))]
        if len(kept) < len(lines):
            file.seek(0)
            file.write("".join(kept))
            file.truncate()


def resolves(name: str) -> bool:
    """Whether a name is known."""
    try:
        socket.gethostbyname(name)
    except OSError:
        return False
    return True
