"""The command line of `slurm/sandbox`."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sandboxed import verbs
from sandboxed.cluster import default_folder
from sandboxed.errors import SandboxError

DESCRIPTION = """\
A real SLURM of several nodes on this machine: munge, slurmctld, a slurmd for each node, and
slurmdbd on MariaDB. The nodes share this machine's CPUs; their GPUs are for SLURM's counting."""
EPILOG = """\
  slurm/sandbox up --nodes 4 --gpus 2       start it (root on Debian: installs what is missing)
  eval "$(slurm/sandbox env)"               let this shell's sbatch, squeue, launch use it
  slurm/sandbox down                        stop it; nothing is left"""
PARTS = "a node, slurmctld or slurmdbd"


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; each verb's function is its `action`."""
    parser = argparse.ArgumentParser(
        prog="slurm/sandbox",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folder = "where its files are, one cluster in each (%(default)s)"
    parser.add_argument("--folder", type=Path, default=default_folder(), help=folder)
    group = parser.add_subparsers(metavar="VERB", required=True)

    def add(name: str, action: Callable[[argparse.Namespace], None], words: str) -> argparse.ArgumentParser:
        verb = group.add_parser(
            name, help=words, description=words, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        verb.set_defaults(action=action)
        return verb

    add_sizes(add("up", verbs.up, "start it"))
    down = add("down", verbs.down, "cancel its jobs, stop it, and remove its files")
    down.add_argument("--now", action="store_true", help="kill the jobs without waiting for their ends")
    add("status", verbs.status, "show its nodes and jobs; fails where a part is not running")
    add("env", verbs.env, 'print what a shell needs: eval "$(slurm/sandbox env)"')
    add("ps", verbs.ps, "list the processes of jobs: number, node, program")
    kill = add("kill", verbs.kill, "kill a node and all that runs on it, or a daemon, as a crash would")
    kill.add_argument("name", metavar="NAME", help=PARTS)
    start = add("start", verbs.start, "start again what was killed")
    start.add_argument("name", metavar="NAME", help=PARTS)
    add("restart-controller", verbs.restart_controller, "stop slurmctld in good order and start it again")
    install = add("install", verbs.install, "install what it needs, where that is missing (root on Debian)")
    install.add_argument("--dry-run", action="store_true", help="only fail where something is missing")
    add_accounting(install)
    return parser


def add_sizes(up: argparse.ArgumentParser) -> None:
    """Add the options of `up`."""
    for name, default, words in (
        ("--nodes", 4, "nodes, called n0, n1, …"),
        ("--gpus", 2, "GPUs of each node; nothing can compute on them"),
        ("--cpus", 16, "threads of each node as SLURM counts them; two a core if a multiple of 4"),
        ("--memory", 16000, "MiB of each node as SLURM counts them"),
        ("--kill-wait", 10, "seconds from SIGTERM to SIGKILL (KillWait)"),
        ("--grace-time", 0, "seconds that a job has which one of partition urgent preempts (GraceTime)"),
        ("--switches", 0, "leaf switches, to which the nodes are dealt in turn; 0 is a network without"),
        ("--slurmd-timeout", 10, "seconds until a silent node is DOWN (SlurmdTimeout)"),
    ):
        up.add_argument(name, type=int, default=default, metavar="N", help=words)
    words = "track and constrain jobs by cgroups of version 1 (memory, cores, devices); auto: where possible"
    up.add_argument("--cgroups", action=argparse.BooleanOptionalAction, default="auto", help=words)
    words = "a preempted job gets the signal that its --signal names"
    up.add_argument("--preempt-signal", action=argparse.BooleanOptionalAction, default=False, help=words)
    add_accounting(up)


def add_accounting(parser: argparse.ArgumentParser) -> None:
    """Add the switch that `up` and `install` share."""
    words = "slurmdbd on MariaDB, for sacct"
    parser.add_argument("--accounting", action=argparse.BooleanOptionalAction, default=True, help=words)


def stop_here(number: int, _: object) -> None:
    """Unwind at SIGTERM and SIGHUP as at Ctrl-C, so that what was begun is taken back."""
    raise SystemExit(128 + number)


def main(argv: Sequence[str]) -> int:
    """Run a command line; returns 0, 1 for a failure, 130 for Ctrl-C."""
    args = make_parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop_here)
    try:
        args.action(args)
    except SandboxError as error:
        sys.stderr.write(f"sandbox: error: {error}\n")
        return 1
    except BrokenPipeError:
        sys.stdout = None  # nobody reads on; no second complaint at exit
    except KeyboardInterrupt:
        sys.stderr.write("sandbox: interrupted\n")
        return 130
    return 0
