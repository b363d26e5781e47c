"""The nodes' names in /etc/hosts: the programs of a job meet on the first node by its name."""

import os
import socket
import sys
from pathlib import Path

from sandboxed.cluster import Cluster

HOSTS = Path("/etc/hosts")


def mark(cluster: Cluster) -> str:
    """What ends our line."""
    return f"# sandbox {cluster.folder}"


def add_names(cluster: Cluster) -> None:
    """Add the names that do not resolve, where that is allowed; else say so."""
    unknown = [name for name in cluster.names if not resolves(name)]
    if not unknown:
        return
    line = f"127.0.0.1 {' '.join(unknown)} {mark(cluster)}"
    if os.access(HOSTS, os.W_OK):
        with HOSTS.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    else:
        sys.stderr.write(f"sandbox: the nodes' names do not resolve; add to {HOSTS}: {line}\n")


def drop_names(cluster: Cluster) -> None:
    """Take our line out again."""
    if not os.access(HOSTS, os.W_OK):
        return
    lines = HOSTS.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.rstrip().endswith(mark(cluster))]
    if len(kept) < len(lines):
        # Written in place: in a container /etc/hosts is a mount and cannot be replaced.
        HOSTS.write_text("".join(kept), encoding="utf-8")


def resolves(name: str) -> bool:
    """Whether a name is known."""
    try:
        socket.gethostbyname(name)
    except OSError:
        return False
    return True
