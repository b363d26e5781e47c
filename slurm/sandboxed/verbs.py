"""What each verb of `slurm/sandbox` does."""

import argparse
import os
import secrets
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

from sandboxed.cgroups import drop_groups, make_groups
from sandboxed.cluster import Cluster, load_cluster, pick_ports, save_cluster
from sandboxed.commands import run, tell
from sandboxed.daemons import start_all, start_controller, start_dbd, start_node
from sandboxed.errors import SandboxError
from sandboxed.hosts import add_names
from sandboxed.packages import ensure_programs, list_missing
from sandboxed.processes import list_processes
from sandboxed.stopping import find_part, kill_part, stop_all, stop_controller


def up(args: argparse.Namespace) -> None:
    """Start a cluster; what was started goes again where it does not come up."""
    folder = args.folder.absolute()
    check_options(args, folder)
    ensure_programs(args.accounting)
    make_folder(folder)
    cluster = Cluster(
        folder=str(folder),
        nodes=args.nodes,
        gpus=args.gpus,
        cpus=args.cpus,
        memory_mib=args.memory,
        accounting=args.accounting,
        kill_wait=args.kill_wait,
        ports=pick_ports(2 + args.nodes),
        grace_time=args.grace_time,
        preempt_signal=args.preempt_signal,
        slurmd_timeout=args.slurmd_timeout,
        switches=args.switches,
        cgroup=f"launch-sandbox-{secrets.token_hex(4)}" if args.cgroups else "",
    )
    save_cluster(cluster)
    try:
        cluster = enter_cgroups(cluster, required=args.cgroups is True)
        add_names(cluster)
        start_all(cluster)
    except BaseException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        show_logs(cluster)
        stop_all(cluster, patient=False)
        raise
    print(f"sandbox: {args.nodes} nodes are up, with partitions main and urgent; in a shell:")
    print(f'  eval "$({shlex.quote(sys.argv[0])} --folder {folder} env)"')


def enter_cgroups(cluster: Cluster, *, required: bool) -> Cluster:
    """Make the cluster's cgroups; without them, say why, or raise SandboxError where they are required."""
    if not cluster.cgroup:
        return cluster
    try:
        make_groups(cluster)
    except SandboxError as error:
        if required:
            raise SandboxError(f"--cgroups: {error}: leave the option out, or give --no-cgroups") from None
        tell(f"jobs are tracked by process group, not by cgroup: {error}")
        drop_groups(cluster)
        cluster = replace(cluster, cgroup="")
        save_cluster(cluster)
    return cluster


def check_options(args: argparse.Namespace, folder: Path) -> None:
    """Raise SandboxError for what cannot be."""
    cluster = load_cluster(folder)
    if cluster and list_processes(cluster):
        raise SandboxError(f"there is a cluster in {folder} already: slurm/sandbox --folder {folder} down")
    if cluster:
        raise SandboxError(f"the cluster in {folder} has died: slurm/sandbox --folder {folder} down")
    if len(str(folder)) > 80 or not str(folder).isprintable() or any(c in str(folder) for c in " #,=%[]"):
        raise SandboxError(f"--folder {folder}: at most 80 characters, without blanks and # , = % [ ]")
    if args.nodes < 1 or args.gpus < 0 or args.cpus < 1 or args.memory < 1:
        raise SandboxError("--nodes, --cpus and --memory from 1, --gpus from 0")
    if not 0 <= args.switches <= args.nodes:
        raise SandboxError("--switches from 0 to the number of nodes")
    if args.kill_wait < 1 or args.grace_time < 0 or args.slurmd_timeout < 3:
        raise SandboxError("--kill-wait from 1, --grace-time from 0, --slurmd-timeout from 3 seconds")


def make_folder(folder: Path) -> None:
    """Make the folder; an empty one of the user's own will do. Raises SandboxError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid() or any(folder.iterdir()):
            raise SandboxError(f"{folder} is no empty folder of yours: name another --folder")
        folder.chmod(0o700)
    except OSError as error:
        raise SandboxError(f"{folder} cannot be made ({error.strerror}): name another --folder") from None


def show_logs(cluster: Cluster) -> None:
    """Show the ends of the logs of a cluster that did not come up."""
    logs = sorted(Path(cluster.folder, "log").glob("*.log"))
    if logs:
        tell("it does not come up: the ends of its logs follow, and it is taken down")
    for path in logs:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        sys.stderr.write("".join(f"{path.name}: {line}\n" for line in lines))


def find_cluster(args: argparse.Namespace) -> Cluster:
    """Return the cluster; raises SandboxError where there is none."""
    cluster = load_cluster(args.folder.absolute())
    if cluster is None:
        raise SandboxError(f"there is no cluster in {args.folder}: slurm/sandbox --folder {args.folder} up")
    return cluster


def down(args: argparse.Namespace) -> None:
    """Stop the cluster."""
    stuck = stop_all(find_cluster(args), patient=not args.now)
    print("sandbox: stopped" + (f"; {stuck} processes of jobs had to be killed" if stuck else ""))


def status(args: argparse.Namespace) -> None:
    """Show nodes and jobs; raises SandboxError where a part is not running."""
    cluster = find_cluster(args)
    parts = (*(("slurmdbd",) if cluster.accounting else ()), "slurmctld", *cluster.names)
    dead = [part for part in parts if not find_part(cluster, part)]
    if len(dead) == len(parts):
        raise SandboxError(f"the cluster in {cluster.folder} has died: slurm/sandbox down, then up")
    if "slurmctld" not in dead:
        for words in (["sinfo"], ["squeue"]):
            print(run(cluster, words), end="")
    if dead:
        raise SandboxError(
            f"{', '.join(dead)} not running: slurm/sandbox start {dead[0]}; logs in {cluster.folder}/log"
        )


def env(args: argparse.Namespace) -> None:
    """Print the variable that SLURM's commands need."""
    print(f"export SLURM_CONF={shlex.quote(str(find_cluster(args).conf))}")


def ps(args: argparse.Namespace) -> None:
    """Print the processes of jobs, one on a line: number, node, program."""
    for process in list_processes(find_cluster(args)):
        if process.of_job:
            print(process.pid, process.node, process.program)


def kill(args: argparse.Namespace) -> None:
    """Kill a node or a daemon."""
    cluster = find_cluster(args)
    check_part(cluster, args.name)
    print(f"sandbox: killed {args.name}: {kill_part(cluster, args.name)} processes")


def start(args: argparse.Namespace) -> None:
    """Start a node or a daemon again."""
    cluster = find_cluster(args)
    check_part(cluster, args.name)
    if find_part(cluster, args.name):
        raise SandboxError(f"{args.name} is running: slurm/sandbox kill {args.name}")
    if args.name == "slurmctld":
        start_controller(cluster, list_running(cluster))
    elif args.name == "slurmdbd":
        start_dbd(cluster)
    else:
        start_node(cluster, args.name)


def check_part(cluster: Cluster, name: str) -> None:
    """Raise SandboxError for what is no node and no daemon of the cluster."""
    parts = (*cluster.names, "slurmctld", *(("slurmdbd",) if cluster.accounting else ()))
    if name not in parts:
        raise SandboxError(f"there is no {name!r} here: one of {', '.join(parts)}")


def restart_controller(args: argparse.Namespace) -> None:
    """Stop slurmctld in good order and start it again."""
    cluster = find_cluster(args)
    stop_controller(cluster)
    start_controller(cluster, list_running(cluster))


def list_running(cluster: Cluster) -> list[str]:
    """Return the nodes whose slurmd runs."""
    return [name for name in cluster.names if find_part(cluster, name)]


def install(args: argparse.Namespace) -> None:
    """Install what is missing; with --dry-run, raises SandboxError that names it."""
    missing = sorted(set(list_missing(args.accounting).values()))
    if missing and args.dry_run:
        raise SandboxError(f"{' '.join(missing)} not installed: slurm/sandbox install, as root on Debian")
    ensure_programs(args.accounting)
