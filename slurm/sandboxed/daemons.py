"""Starts and stops the daemons of a cluster."""

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sandboxed.cluster import Cluster
from sandboxed.errors import SandboxError
from sandboxed.packages import SYSTEM_PATH
from sandboxed.render import render_dbd_conf, render_gres_conf, render_slurm_conf

PATIENCE = 60.0
"""Seconds that a daemon has to answer."""


def environ_of(cluster: Cluster) -> dict[str, str]:
    """The environment of daemons and clients: no variable of another cluster or job."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM", "SBATCH", "SRUN", "SALLOC"))}
    path = f"{os.environ.get('PATH', '/usr/bin:/bin')}:{SYSTEM_PATH}"
    return {**clean, "PATH": path, "SLURM_CONF": str(cluster.conf)}


def write_files(cluster: Cluster) -> None:
    """Write the configuration, the key and the devices; the folder is the user's alone."""
    folder = Path(cluster.folder)
    for name in ("state", "log", "gpus", *(f"spool/{node}" for node in cluster.names)):
        (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in range(cluster.gpus):
        make_device(folder / "gpus" / f"nvidia{number}")
    write_private(folder / "munge.key", os.urandom(1024))
    cluster.conf.write_text(render_slurm_conf(cluster), encoding="utf-8")
    (folder / "gres.conf").write_text(render_gres_conf(cluster), encoding="utf-8")
    write_private(folder / "slurmdbd.conf", render_dbd_conf(cluster).encode())


def write_private(path: Path, data: bytes) -> None:
    """Write a file that its owner alone may read, as munged and slurmdbd demand."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def make_device(path: Path) -> None:
    """A second /dev/null; users other than root cannot make one, and a plain file does for SLURM's counting."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        path.touch()


def start_all(cluster: Cluster) -> None:
    """Start the daemons one after the other, each once the one before answers."""
    write_files(cluster)
    start_munge(cluster)
    if cluster.accounting:
        start_database(cluster)
        start(cluster, ["slurmdbd"], ["sacctmgr", "--noheader", "list", "cluster"])
        run(cluster, ["sacctmgr", "--immediate", "add", "cluster", "sandbox"])
    start(cluster, ["slurmctld", "-f", str(cluster.conf)], ["scontrol", "ping"])
    for name in cluster.names:
        run(cluster, ["slurmd", "-f", str(cluster.conf), "-N", name])
    wait_until("the nodes to register", lambda: len(list_idle(cluster)) == cluster.nodes, cluster)


def start_munge(cluster: Cluster) -> None:
    """Start munged with the cluster's own key and socket."""
    socket = cluster.path("munge.socket")
    options = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
    options |= {"log-file": "log/munged.log", "seed-file": "munge.seed"}
    words = ["munged", "--force", *(f"--{name}={cluster.path(file)}" for name, file in options.items())]
    start(cluster, words, ["munge", "--no-input", f"--socket={socket}"])


def start_database(cluster: Cluster) -> None:
    """Start MariaDB with a database for slurmdbd, on this host only."""
    data, socket = cluster.path("mysql"), cluster.path("mysql.socket")
    user = Path(cluster.folder).owner()
    install = ["mariadb-install-db", "--no-defaults", f"--user={user}", f"--datadir={data}"]
    run(cluster, [*install, "--auth-root-authentication-method=normal", "--skip-test-db"])
    words = ["mariadbd", "--no-defaults", f"--user={user}", f"--datadir={data}", f"--socket={socket}"]
    words += [f"--port={cluster.ports[2]}", "--bind-address=127.0.0.1", f"--pid-file={cluster.path('mariadb.pid')}"]
    words += ["--innodb-lock-wait-timeout=900", f"--log-error={cluster.path('log/mariadb.log')}"]
    subprocess.Popen(words, env=environ_of(cluster), stdin=subprocess.DEVNULL, start_new_session=True)
    client = ["mariadb", "--no-defaults", f"--socket={socket}", "--user=root", "--execute"]
    wait_until("MariaDB", lambda: answers(cluster, [*client, "select 1"]), cluster)
    for host in ("localhost", "127.0.0.1"):
        run(cluster, [*client, f"create user slurm@{host}; grant all on slurm.* to slurm@{host}"])
    run(cluster, [*client, "create database slurm"])


def start(cluster: Cluster, words: Sequence[str], question: Sequence[str]) -> None:
    """Start a daemon, and wait until it answers."""
    run(cluster, words)
    wait_until(words[0], lambda: answers(cluster, question), cluster)


def run(cluster: Cluster, words: Sequence[str]) -> str:
    """Run a command and return its output; raises SandboxError with what it said."""
    done = subprocess.run(
        words, env=environ_of(cluster), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise SandboxError(f"{' '.join(words)} failed with {done.returncode}: {said}: see {cluster.folder}/log")
    return done.stdout


def answers(cluster: Cluster, question: Sequence[str]) -> bool:
    """Whether a command succeeds."""
    try:
        run(cluster, question)
    except SandboxError:
        return False
    return True


def wait_until(what: str, check: Callable[[], bool], cluster: Cluster) -> None:
    """Poll until a condition holds; raises SandboxError after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not check():
        if time.monotonic() > end:
            raise SandboxError(f"waited {PATIENCE:.0f} s for {what} in vain: see {cluster.folder}/log")
        time.sleep(0.05)


def list_idle(cluster: Cluster) -> list[str]:
    """Nodes that can take jobs."""
    shown = run(cluster, ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t"])
    return [line.split()[0] for line in shown.splitlines() if line.split()[1:] in (["idle"], ["mix"], ["alloc"])]


def stop_all(cluster: Cluster) -> None:
    """Cancel the jobs, stop the daemons, and remove the folder."""
    if answers(cluster, ["scontrol", "ping"]):
        end_jobs(cluster)
    for name in ("slurmctld", *(f"slurmd-{node}" for node in cluster.names), "slurmdbd", "mariadb", "munged"):
        stop(Path(cluster.path(f"{name}.pid")), cluster)
    shutil.rmtree(cluster.folder)


def end_jobs(cluster: Cluster) -> None:
    """Cancel every job and wait for their ends."""
    jobs = run(cluster, ["squeue", "--noheader", "--format=%A"]).split()
    if jobs:
        run(cluster, ["scancel", *jobs])
        wait_until("the jobs' ends", lambda: not run(cluster, ["squeue", "--noheader"]).strip(), cluster)


def stop(pid_file: Path, cluster: Cluster) -> None:
    """End the process of a pid file, if it is still this cluster's."""
    try:
        pid = int(pid_file.read_text())
        handle = os.pidfd_open(pid)
    except (OSError, ValueError):
        return
    with os.fdopen(handle):
        if is_ours(pid, cluster):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            wait_until(pid_file.stem, lambda: not is_ours(pid, cluster), cluster)


def is_ours(pid: int, cluster: Cluster) -> bool:
    """Whether a process was started for this cluster: its command line or environment names the folder."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words, open(f"/proc/{pid}/environ", "rb") as environ:
            return cluster.folder.encode() in words.read() + environ.read()
    except OSError:
        return False
