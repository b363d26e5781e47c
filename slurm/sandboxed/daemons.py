"""Starts and stops a cluster, or parts of it."""

import fcntl
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sandboxed.cgroups import drop_groups, has_swap_limit, remove_groups, thaw_jobs
from sandboxed.cluster import DESCRIPTION, Cluster, SandboxError, find_user, tell
from sandboxed.conf import write_files
from sandboxed.processes import find_part, kill_processes, list_processes

HOSTS = Path("/etc/hosts")
SLACK = 5.0
"""Seconds that jobs have to end beyond KillWait."""


def start_all(cluster: Cluster) -> None:
    """Start the daemons one after the other, each once the one before answers."""
    add_names(cluster)
    write_files(cluster, swap=has_swap_limit(cluster))
    munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
    munge |= {"log-file": "log/munged.log", "seed-file": "munge.seed"}
    cluster.run("munged", "--force", *(f"--{name}={cluster.path(file)}" for name, file in munge.items()))
    ask = ["munge", "--no-input", f"--socket={cluster.path('munge.socket')}"]
    cluster.wait_until("munged", lambda: cluster.answers(*ask))
    if cluster.accounting:
        tell("starting MariaDB and slurmdbd; --no-accounting does without")
        _start_database(cluster)
        _start_part(cluster, "slurmdbd")
        add = ["sacctmgr", "--immediate", "add"]
        cluster.run(*add, "cluster", "sandbox")
        if find_user() != "root":  # which the accounting has from the start
            cluster.run(*add, "account", "sandbox")
            cluster.run(*add, "user", find_user(), "account=sandbox")
    tell(f"starting slurmctld and {cluster.nodes} slurmd")
    _start_part(cluster, "slurmctld")
    for name in cluster.names:
        _run_node(cluster, name)
    _await_nodes(cluster, cluster.names)


def start_part(cluster: Cluster, name: str) -> None:
    """Start a node or a daemon again; slurmctld takes up its saved state, and hears from running nodes."""
    if name in cluster.names:
        _run_node(cluster, name)
        _await_nodes(cluster, [name])
    else:
        _start_part(cluster, name)
        if name == "slurmctld":
            _await_nodes(cluster, [node for node in cluster.names if find_part(cluster, node)])


def _start_part(cluster: Cluster, daemon: str) -> None:
    """Start slurmctld or slurmdbd, and wait until it answers."""
    cluster.run(daemon)
    asks = {"slurmctld": ["scontrol", "ping"], "slurmdbd": ["sacctmgr", "--noheader", "list", "cluster"]}
    cluster.wait_until(daemon, lambda: cluster.answers(*asks[daemon]))


def _start_database(cluster: Cluster) -> None:
    """Start MariaDB with a database for slurmdbd; it listens on a socket in the cluster's folder alone."""
    common = ["--no-defaults", f"--user={find_user()}", f"--datadir={cluster.path('mysql')}"]
    common.append(f"--tmpdir={cluster.folder}")
    install = ["mariadb-install-db", *common, "--auth-root-authentication-method=normal", "--skip-test-db"]
    cluster.run(*install)
    socket_option = f"--socket={cluster.path('mysql.socket')}"
    words = ["mariadbd", *common, socket_option, "--skip-networking", "--innodb-lock-wait-timeout=900"]
    words += [f"--pid-file={cluster.path('mariadb.pid')}"]
    _spawn(cluster, words, "mariadb.log")
    client = ["mariadb", "--no-defaults", socket_option, "--user=root", "--execute"]
    cluster.wait_until("MariaDB", lambda: cluster.answers(*client, "select 1"))
    cluster.run(*client, "create database slurm; create user slurm@localhost")
    cluster.run(*client, "grant all on slurm.* to slurm@localhost")


def _run_node(cluster: Cluster, name: str) -> None:
    """Start a node's slurmd below its keeper, without waiting for it to register; raises SandboxError."""
    words = [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")), cluster.folder, name]
    keeper = _spawn(cluster, [*words, "slurmd", "-N", name], f"slurmd-{name}.err", subprocess.PIPE)
    code = keeper.stdout.readline().decode().strip() if keeper.stdout else ""
    if code != "0":
        raise SandboxError(f"slurmd of {name} ended with {code or 'its keeper'}: see {cluster.folder}/log")


def _spawn(
    cluster: Cluster, words: Sequence[str], log_name: str, stdout: int | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own, what it says in a file of the log folder."""
    with cluster.path("log", log_name).open("ab") as log:
        return subprocess.Popen(
            words,
            env=cluster.environ,
            stdin=subprocess.DEVNULL,
            stdout=stdout or log,
            stderr=log,
            start_new_session=True,
        )


def _await_nodes(cluster: Cluster, names: Sequence[str]) -> None:
    """Wait until slurmctld hears from nodes; sinfo calls others unknown, or marks them with a `*`."""
    ask = ("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t")

    def have_registered() -> bool:
        states = dict(line.split() for line in cluster.run(*ask).splitlines())
        return not any(states[name].startswith("unk") or states[name].endswith("*") for name in names)

    cluster.wait_until(f"{', '.join(names)} to register", have_registered)


def stop_all(cluster: Cluster, *, patient: bool) -> int:
    """End jobs and daemons and remove all traces; return how many processes of jobs had to be killed.

    The daemons get SIGKILL as well, since what they would write down goes away.
    """
    if patient and cluster.answers("scontrol", "ping"):
        _end_jobs(cluster)
    stuck = sum(process.of_job for process in list_processes(cluster))
    for node in cluster.names:
        thaw_jobs(cluster, node)
    kill_processes(cluster, lambda _: True)
    drop_groups(cluster)
    drop_names(cluster)
    folder = Path(cluster.folder)
    for path in folder.iterdir():  # what describes the cluster goes last, so that this can be taken up again
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != DESCRIPTION:
            path.unlink()
    shutil.rmtree(folder)
    return stuck


def _end_jobs(cluster: Cluster) -> None:
    """Cancel every job, and wait for their ends as long as they may take."""
    ask = ("squeue", "--noheader", "--format=%A")
    jobs = set(cluster.run(*ask).split())
    if not jobs:
        return
    tell(f"cancelling {len(jobs)} jobs")

    def have_ended() -> bool:
        return not cluster.run(*ask).strip() and not any(each.of_job for each in list_processes(cluster))

    try:
        cluster.run("scancel", *sorted(jobs))
        cluster.wait_until("the jobs' ends", have_ended, cluster.kill_wait + SLACK)
    except SandboxError as error:
        tell(f"{error}: what is left is killed")


def kill_part(cluster: Cluster, name: str) -> int:
    """Kill a node (slurmd and all below it) or a daemon as a crash would, and return how many processes.

    Unlike with a machine that lost its power, the other ends of its connections see them closed.
    """
    thaw_jobs(cluster, name)
    killed = kill_processes(cluster, lambda process: name in (process.node, process.program))
    remove_groups(cluster, name)
    return len(killed)


def restart_controller(cluster: Cluster) -> None:
    """End slurmctld in good order, so that it saves its state, and start it again."""
    for process in find_part(cluster, "slurmctld"):
        os.kill(process.pid, signal.SIGTERM)
    cluster.wait_until("slurmctld to end", lambda: not find_part(cluster, "slurmctld"))
    start_part(cluster, "slurmctld")


def add_names(cluster: Cluster) -> None:
    """Add a line of the cluster's own to /etc/hosts, also where another's has the same names.

    The programs of a job meet on the first node by its name, and SLURM's clients are called back by this
    machine's. Where the file may not be written, a line says how to.
    """
    host = socket.gethostname()
    names = [*cluster.names, *([] if _resolves(host) else [host])]
    line = f"127.0.0.1 {' '.join(names)} # sandbox {cluster.folder}"
    if os.access(HOSTS, os.W_OK):
        with HOSTS.open("r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read()
            file.write(f"{'' if text.endswith(chr(10)) or not text else chr(10)}{line}\n")
    elif not all(map(_resolves, names)):
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
        kept = [line for line in lines if not line.rstrip().endswith(f"# sandbox {cluster.folder}")]
        if len(kept) < len(lines):
            file.seek(0)
            file.write("".join(kept))
            file.truncate()


def _resolves(name: str) -> bool:
    try:
        socket.gethostbyname(name)
    except OSError:
        return False
    return True
