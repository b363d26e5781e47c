"""Starts the daemons of a cluster."""

import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sandboxed.cgroups import has_swap_limit
from sandboxed.cluster import Cluster, find_user
from sandboxed.commands import answers, environ_of, run, tell, wait_until
from sandboxed.errors import SandboxError
from sandboxed.packages import find_version
from sandboxed.render import (
    render_cgroup_conf,
    render_dbd_conf,
    render_gres_conf,
    render_slurm_conf,
    render_topology_conf,
)

NVIDIA, FIRST_MINOR = 195, 256
"""Linux's number for NVIDIA's driver (Documentation/admin-guide/devices.txt), and ours in it."""
KEEPER = Path(__file__).with_name("keeper.py")


def write_files(cluster: Cluster) -> None:
    """Write the configuration, the key and the devices; the folder is the user's alone."""
    folder = Path(cluster.folder)
    for name in ("state", "log", "gpus", *(f"spool/{node}" for node in cluster.names)):
        (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in range(cluster.gpus):
        make_device(folder / "gpus" / f"nvidia{number}", number)
    write_private(folder / "munge.key", os.urandom(1024))
    user = find_user()
    cluster.conf.write_text(render_slurm_conf(cluster, user), encoding="utf-8")
    (folder / "gres.conf").write_text(render_gres_conf(cluster), encoding="utf-8")
    if cluster.switches:
        (folder / "topology.conf").write_text(render_topology_conf(cluster), encoding="utf-8")
    version = find_version(run(cluster, ["slurmd", "-V"]))
    constraints = render_cgroup_conf(cluster, version, has_swap_limit(cluster))
    (folder / "cgroup.conf").write_text(constraints, encoding="utf-8")
    write_private(folder / "slurmdbd.conf", render_dbd_conf(cluster, user).encode())


def write_private(path: Path, data: bytes) -> None:
    """Write a file that its owner alone may read, as munged and slurmdbd demand."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def make_device(path: Path, number: int) -> None:
    """Make a device that no driver serves; only root can, and a plain file does for SLURM's counting.

    It is of NVIDIA's kind with a number that no GPU has (they end at 255), since SLURM's device cgroups
    forbid jobs by these numbers what is not theirs: a copy of /dev/null would lock away that, and one of a
    real GPU's number the GPU.
    """
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(NVIDIA, FIRST_MINOR + number))
    except PermissionError:
        path.touch()


def start_all(cluster: Cluster) -> None:
    """Start the daemons one after the other, each once the one before answers."""
    write_files(cluster)
    start_munge(cluster)
    if cluster.accounting:
        tell("starting MariaDB and slurmdbd; --no-accounting does without")
        start_database(cluster)
        start_dbd(cluster)
        add_accounts(cluster)
    tell(f"starting slurmctld and {cluster.nodes} slurmd")
    start_controller(cluster)
    for name in cluster.names:
        run_node(cluster, name)
    wait_until("the nodes to register", lambda: set(cluster.names) <= list_answering(cluster), cluster)


def start_munge(cluster: Cluster) -> None:
    """Start munged with the cluster's own key and socket."""
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
    files |= {"log-file": "log/munged.log", "seed-file": "munge.seed"}
    words = ["munged", "--force", *(f"--{name}={cluster.path(file)}" for name, file in files.items())]
    start(cluster, words, ["munge", "--no-input", f"--socket={cluster.path('munge.socket')}"])


def start_database(cluster: Cluster) -> None:
    """Start MariaDB with a database for slurmdbd; it listens on a socket in the cluster's folder alone."""
    data, user, socket = cluster.path("mysql"), find_user(), cluster.path("mysql.socket")
    common = ["--no-defaults", f"--user={user}", f"--datadir={data}", f"--tmpdir={cluster.folder}"]
    install = ["mariadb-install-db", *common, "--auth-root-authentication-method=normal", "--skip-test-db"]
    run(cluster, install)
    words = ["mariadbd", *common, f"--socket={socket}", "--skip-networking", "--innodb-lock-wait-timeout=900"]
    words += [f"--pid-file={cluster.path('mariadb.pid')}"]
    with Path(cluster.path("log/mariadb.log")).open("ab") as log:
        subprocess.Popen(
            words,
            env=environ_of(cluster),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    client = ["mariadb", "--no-defaults", f"--socket={socket}", "--user=root", "--execute"]
    wait_until("MariaDB", lambda: answers(cluster, [*client, "select 1"]), cluster)
    run(cluster, [*client, "create database slurm; create user slurm@localhost"])
    run(cluster, [*client, "grant all on slurm.* to slurm@localhost"])


def start_dbd(cluster: Cluster) -> None:
    """Start the accounting daemon."""
    start(cluster, ["slurmdbd"], ["sacctmgr", "--noheader", "list", "cluster"])


def add_accounts(cluster: Cluster) -> None:
    """Make the cluster known to the accounting, and the user too: it has root alone from the start."""
    add = ["sacctmgr", "--immediate", "add"]
    run(cluster, [*add, "cluster", "sandbox"])
    if find_user() != "root":
        run(cluster, [*add, "account", "sandbox"])
        run(cluster, [*add, "user", find_user(), "account=sandbox"])


def start_controller(cluster: Cluster, nodes: Sequence[str] = ()) -> None:
    """Start slurmctld, which takes up the state that was saved, and wait until it hears from nodes."""
    start(cluster, ["slurmctld", "-f", str(cluster.conf)], ["scontrol", "ping"])
    wait_until("the nodes to register", lambda: set(nodes) <= list_answering(cluster), cluster)


def run_node(cluster: Cluster, name: str) -> None:
    """Start a node's slurmd below its keeper, without waiting for it to register; raises SandboxError."""
    words = [sys.executable, "-I", "-S", str(KEEPER), cluster.folder, name]
    words += ["slurmd", "-f", str(cluster.conf), "-N", name]
    with Path(cluster.path(f"log/slurmd-{name}.err")).open("ab") as log:
        keeper = subprocess.Popen(
            words,
            env=environ_of(cluster),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    with keeper.stdout or Path(os.devnull).open("rb") as said:
        code = said.readline().decode().strip()
    if code != "0":
        raise SandboxError(f"slurmd of {name} ended with {code or 'its keeper'}: see {log.name}")


def start_node(cluster: Cluster, name: str) -> None:
    """Start a node's slurmd, and wait until slurmctld takes the node back."""
    run_node(cluster, name)
    wait_until(f"{name} to register", lambda: name in list_answering(cluster), cluster)


def start(cluster: Cluster, words: Sequence[str], question: Sequence[str]) -> None:
    """Start a daemon, and wait until it answers."""
    run(cluster, words)
    wait_until(words[0], lambda: answers(cluster, question), cluster)


def list_answering(cluster: Cluster) -> set[str]:
    """Return the nodes that slurmctld hears from; sinfo calls others unknown, or marks them with a `*`."""
    shown = run(cluster, ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t"])
    pairs = (line.split() for line in shown.splitlines())
    return {name for name, state in pairs if not state.startswith("unk") and not state.endswith("*")}
