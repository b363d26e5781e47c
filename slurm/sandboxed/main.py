"""The command line of `slurm/sandbox`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sandboxed.cluster import Cluster, default_folder, load_cluster, pick_ports, save_cluster
from sandboxed.daemons import answers, run, start_all, stop_all
from sandboxed.errors import SandboxError
from sandboxed.hosts import add_names, drop_names
from sandboxed.packages import ensure_programs, list_missing


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="slurm/sandbox", description="A real SLURM of several nodes on this machine.")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where its files are (%(default)s)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start it", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    up.add_argument("--nodes", type=int, default=4, help="nodes")
    up.add_argument("--gpus", type=int, default=2, help="GPUs of each node; nothing can compute on them")
    up.add_argument("--cpus", type=int, default=16, help="threads of each node, as SLURM counts them; a multiple of 4")
    up.add_argument("--memory", type=int, default=16000, help="MiB of each node, as SLURM counts it")
    up.add_argument("--accounting", action=argparse.BooleanOptionalAction, default=True, help="slurmdbd and sacct")
    up.add_argument("--kill-wait", type=int, default=10, help="seconds from SIGTERM to SIGKILL")
    verbs.add_parser("down", help="cancel its jobs, stop it, and remove its files")
    verbs.add_parser("status", help="show its nodes and jobs")
    verbs.add_parser("env", help='print what a shell needs: eval "$(slurm/sandbox env)"')
    install = verbs.add_parser("install", help="install what it needs, where that is missing (Debian, as root)")
    install.add_argument("--accounting", action=argparse.BooleanOptionalAction, default=True)
    install.add_argument("--dry-run", action="store_true", help="only print the packages; 1 where some are missing")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a command line; returns 0, 1 for a failure, 3 where there is no cluster."""
    args = make_parser().parse_args(argv)
    try:
        return {"up": up, "down": down, "status": status, "env": env, "install": install_programs}[args.verb](args)
    except SandboxError as error:
        sys.stderr.write(f"sandbox: error: {error}\n")
        return 1


def install_programs(args: argparse.Namespace) -> int:
    """Install what is missing, or print it."""
    if args.dry_run:
        missing = list_missing(args.accounting)
        print(*missing)
        return int(bool(missing))
    ensure_programs(args.accounting)
    return 0


def up(args: argparse.Namespace) -> int:
    """Start a cluster; what was started goes again where it does not come up."""
    folder = args.folder.absolute()
    check_options(args, folder)
    ensure_programs(args.accounting)
    folder.mkdir(mode=0o700, parents=True)
    cluster = Cluster(
        folder=str(folder),
        nodes=args.nodes,
        gpus=args.gpus,
        cpus=args.cpus,
        memory_mib=args.memory,
        accounting=args.accounting,
        kill_wait=args.kill_wait,
        ports=pick_ports(3 + args.nodes),
    )
    save_cluster(cluster)
    try:
        start_all(cluster)
    except BaseException:
        keep_logs(cluster)
        stop_all(cluster)
        raise
    add_names(cluster)
    print(f"sandbox: {args.nodes} nodes are up, with partitions main and urgent; in a shell:")
    print(f'  eval "$({sys.argv[0]} --folder {folder} env)"')
    return 0


def check_options(args: argparse.Namespace, folder: Path) -> None:
    """Raise SandboxError for what cannot be."""
    if load_cluster(folder):
        raise SandboxError(f"there is a cluster in {folder} already: slurm/sandbox down")
    if folder.exists():
        raise SandboxError(f"{folder} exists and is no sandbox: name another --folder")
    if len(str(folder)) > 80 or not str(folder).isprintable() or any(c in str(folder) for c in " #,="):
        raise SandboxError(f"--folder {folder}: SLURM takes no blanks, and sockets no more than 80 characters")
    if args.nodes < 1 or args.gpus < 0 or args.cpus < 4 or args.cpus % 4:
        raise SandboxError("--nodes from 1, --gpus from 0, --cpus a multiple of 4")


def keep_logs(cluster: Cluster) -> None:
    """Show the ends of the logs of a cluster that did not come up."""
    for path in sorted(Path(cluster.folder, "log").glob("*.log")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        sys.stderr.write("".join(f"{path.name}: {line}\n" for line in lines))


def find_cluster(args: argparse.Namespace) -> Cluster:
    """The running cluster; raises SandboxError where there is none."""
    cluster = load_cluster(args.folder.absolute())
    if cluster is None:
        raise SandboxError(f"there is no cluster in {args.folder}: slurm/sandbox up")
    return cluster


def down(args: argparse.Namespace) -> int:
    """Stop the cluster."""
    cluster = find_cluster(args)
    drop_names(cluster)
    stop_all(cluster)
    print("sandbox: stopped")
    return 0


def status(args: argparse.Namespace) -> int:
    """Show nodes and jobs."""
    cluster = find_cluster(args)
    if not answers(cluster, ["scontrol", "ping"]):
        raise SandboxError(f"slurmctld does not answer: see {cluster.folder}/log, then slurm/sandbox down")
    for words in (["sinfo"], ["squeue"]):
        print(run(cluster, words), end="")
    return 0


def env(args: argparse.Namespace) -> int:
    """Print the variable that SLURM's commands need."""
    print(f"export SLURM_CONF={find_cluster(args).conf}")
    return 0
