"""The command line of `slurm/sandbox`, and what each verb does."""

import argparse
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from sandboxed.cgroups import drop_groups, make_groups
from sandboxed.cluster import SYSTEM_PATH, Cluster, SandboxError, load_cluster, pick_ports, suggest, tell
from sandboxed.daemons import kill_part, restart_controller, start_all, start_part, stop_all
from sandboxed.processes import find_part, list_processes

DESCRIPTION = """\
A real SLURM of several nodes on this machine: munge, slurmctld, a slurmd for each node, and
slurmdbd on MariaDB. The nodes share this machine's CPUs; their GPUs are for SLURM's counting."""
EPILOG = """\
  slurm/sandbox up --nodes 4 --gpus 2       start it (root on Debian: installs what is missing)
  eval "$(slurm/sandbox env)"               let this shell's sbatch, squeue, launch use it
  slurm/sandbox down                        stop it; nothing is left"""
SIZES = [field for field in fields(Cluster) if "least" in field.metadata]
PROGRAMS = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "mariadb": "mariadb-client-core",
}
"""What a cluster needs, with and without accounting, and Debian's packages that hold it."""
INSTALL = ("apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "--yes", "--no-install-recommends")
Options = argparse.Namespace


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; each verb's function is its `action`."""
    parser = argparse.ArgumentParser(
        prog="slurm/sandbox",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # A folder for each user, with a short path, since a munge socket's must be.
    folder = Path(f"/tmp/launch-sandbox-{os.geteuid()}")  # noqa: S108  # never taken over from someone else
    words = "where its files are, one cluster in each (%(default)s)"
    parser.add_argument("--folder", type=Path, default=folder, help=words)
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def add(name: str, action: Callable[[Options], None], words: str) -> argparse.ArgumentParser:
        kind = argparse.ArgumentDefaultsHelpFormatter
        verb = verbs.add_parser(name, help=words, description=words, formatter_class=kind)
        verb.set_defaults(action=action)
        return verb

    def add_switch(verb: argparse.ArgumentParser, name: str, default: object, words: str) -> None:
        verb.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=words)

    up_ = add("up", up, "start it")
    for size in SIZES:
        option, words = f"--{size.name.replace('_', '-')}", size.metadata["help"]
        up_.add_argument(option, type=int, default=size.default, metavar="N", help=words)
    words = "track and constrain jobs by cgroups of version 1 (memory, cores, devices); auto: where possible"
    add_switch(up_, "--cgroups", "auto", words)
    add_switch(up_, "--preempt-signal", False, "a preempted job gets the signal that its --signal names")
    down_ = add("down", down, "cancel its jobs, stop it, and remove its files")
    down_.add_argument("--now", action="store_true", help="kill the jobs without waiting for their ends")
    add("status", status, "show its nodes and jobs; fails where a part is not running")
    add("env", env, 'print what a shell needs: eval "$(slurm/sandbox env)"')
    add("ps", ps, "list the processes of jobs: number, node, program")
    for name, action, words in (
        ("kill", kill, "kill a node and all that runs on it, or a daemon, as a crash would"),
        ("start", start, "start again what was killed"),
    ):
        add(name, action, words).add_argument("name", metavar="NAME", help="a node, slurmctld or slurmdbd")
    words = "stop slurmctld in good order and start it again"
    add("restart-controller", lambda options: restart_controller(find_cluster(options)), words)
    install_ = add("install", install, "install what it needs, where that is missing (root on Debian)")
    install_.add_argument("--dry-run", action="store_true", help="only fail where something is missing")
    for verb in (up_, install_):
        add_switch(verb, "--accounting", True, "slurmdbd on MariaDB, for sacct")
    return parser


def up(options: Options) -> None:
    """Start a cluster; what was started goes again where it does not come up."""
    folder = options.folder.absolute()
    if found := load_cluster(folder):
        state = f"there is a cluster in {folder} already"
        state = state if list_processes(found) else f"the cluster in {folder} has died"
        raise SandboxError(f"{state}: {suggest(folder, 'down')}")
    if len(str(folder)) > 80 or not str(folder).isprintable() or any(c in str(folder) for c in " #,=%[]"):
        raise SandboxError(f"--folder {folder}: at most 80 characters, without blanks and # , = % [ ]")
    sizes = {size.name: getattr(options, size.name) for size in SIZES}
    for size in SIZES:
        if sizes[size.name] < size.metadata["least"]:
            raise SandboxError(f"--{size.name.replace('_', '-')} from {size.metadata['least']} on")
    if options.switches > options.nodes:
        raise SandboxError("--switches up to the number of nodes")
    ensure_programs(options.accounting)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid() or any(folder.iterdir()):
            raise SandboxError(f"{folder} is no empty folder of yours: name another --folder")
        folder.chmod(0o700)
    except OSError as error:
        raise SandboxError(f"{folder} cannot be made ({error.strerror}): name another --folder") from None
    cgroup = f"launch-sandbox-{secrets.token_hex(4)}" if options.cgroups else ""
    switches = {"accounting": options.accounting, "preempt_signal": options.preempt_signal}
    cluster = Cluster(str(folder), pick_ports(2 + options.nodes), cgroup=cgroup, **switches, **sizes)
    cluster.save()
    try:
        if cgroup:
            cluster = enter_cgroups(cluster, required=options.cgroups is True)
        start_all(cluster)
    except BaseException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if logs := sorted(cluster.path("log").glob("*.log")):
            tell("it does not come up: the ends of its logs follow, and it is taken down")
        for path in logs:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            sys.stderr.write("".join(f"{path.name}: {line}\n" for line in lines))
        stop_all(cluster, patient=False)
        raise
    print(f"sandbox: {options.nodes} nodes are up, with partitions main and urgent; in a shell:")
    print(f'  eval "$({shlex.quote(sys.argv[0])} --folder {folder} env)"')


def enter_cgroups(cluster: Cluster, *, required: bool) -> Cluster:
    """Make the cluster's cgroups; without them, say why, or raise SandboxError where they are required."""
    try:
        make_groups(cluster)
    except SandboxError as error:
        if required:
            raise SandboxError(f"--cgroups: {error}: leave the option out, or give --no-cgroups") from None
        tell(f"jobs are tracked by process group, not by cgroup: {error}")
        drop_groups(cluster)
        cluster = replace(cluster, cgroup="")
        cluster.save()
    return cluster


def find_cluster(options: Options) -> Cluster:
    """Return the cluster; raises SandboxError where there is none."""
    cluster = load_cluster(options.folder.absolute())
    if cluster is None:
        raise SandboxError(f"there is no cluster in {options.folder}: {suggest(options.folder, 'up')}")
    return cluster


def down(options: Options) -> None:
    """Stop the cluster."""
    stuck = stop_all(find_cluster(options), patient=not options.now)
    print("sandbox: stopped" + (f"; {stuck} processes of jobs had to be killed" if stuck else ""))


def status(options: Options) -> None:
    """Show nodes and jobs; raises SandboxError where a part is not running."""
    cluster = find_cluster(options)
    dead = [part for part in cluster.parts if not find_part(cluster, part)]
    if len(dead) == len(cluster.parts):
        raise SandboxError(f"the cluster in {cluster.folder} has died: slurm/sandbox down, then up")
    if "slurmctld" not in dead:
        for command in ("sinfo", "squeue"):
            print(cluster.run(command), end="")
    if dead:
        advice = f"slurm/sandbox start {dead[0]}; logs in {cluster.folder}/log"
        raise SandboxError(f"{', '.join(dead)} not running: {advice}")


def env(options: Options) -> None:
    """Print the variable that SLURM's commands need."""
    print(f"export SLURM_CONF={shlex.quote(str(find_cluster(options).path('slurm.conf')))}")


def ps(options: Options) -> None:
    """Print the processes of jobs, one on a line: number, node, program."""
    for process in list_processes(find_cluster(options)):
        if process.of_job:
            print(process.pid, process.node, process.program)


def find_running(options: Options, *, running: bool) -> Cluster:
    """Return the cluster of a named part; raises SandboxError unless it is a part that runs, or does not."""
    cluster, name = find_cluster(options), options.name
    if name not in cluster.parts:
        raise SandboxError(f"there is no {name!r} here: one of {', '.join(cluster.parts)}")
    if running != bool(find_part(cluster, name)):
        state, verb = ("not running", "start") if running else ("running", "kill")
        raise SandboxError(f"{name} is {state}: slurm/sandbox {verb} {name}")
    return cluster


def kill(options: Options) -> None:
    """Kill a node or a daemon."""
    killed = kill_part(find_running(options, running=True), options.name)
    print(f"sandbox: killed {options.name}: {killed} processes")


def start(options: Options) -> None:
    """Start a node or a daemon again."""
    start_part(find_running(options, running=False), options.name)


def install(options: Options) -> None:
    """Install what is missing; with --dry-run, raises SandboxError that names it."""
    missing = sorted(set(list_missing(options.accounting).values()))
    if missing and options.dry_run:
        raise SandboxError(f"{' '.join(missing)} not installed: slurm/sandbox install, as root on Debian")
    ensure_programs(options.accounting)


def ensure_programs(accounting: bool) -> None:
    """Install what is missing; raises SandboxError where that is not possible."""
    missing = list_missing(accounting)
    packages = sorted(set(missing.values()))
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise SandboxError(f"{', '.join(missing)} missing, and no apt-get: install SLURM, munge and MariaDB")
    if os.geteuid():
        command = f"sudo apt-get install --no-install-recommends {' '.join(packages)}"
        raise SandboxError(f"{', '.join(missing)} missing, and only root can install: {command}")
    tell(f"installing {' '.join(packages)}, some 100 MB with what they need")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (("apt-get", "update"), (*INSTALL, *packages)):
        done = subprocess.run(
            words, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    left = list_missing(accounting)
    if done.returncode or left:
        said = done.stderr.strip()[-300:] or f"{', '.join(left)} still missing"
        raise SandboxError(f"apt-get install {' '.join(packages)} failed: {said}: install them by hand")


def list_missing(accounting: bool) -> dict[str, str]:
    """Return the programs that are not there, with their packages."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    needed = {**PROGRAMS, **(ACCOUNTING if accounting else {})}
    return {program: package for program, package in needed.items() if not shutil.which(program, path=path)}


def main(argv: Sequence[str]) -> int:
    """Run a command line; returns 0, 1 for a failure, 130 for Ctrl-C."""
    options = make_parser().parse_args(argv)

    def stop_here(number: int, _: object) -> None:
        """Unwind at SIGTERM and SIGHUP as at Ctrl-C, so that what was begun is taken back."""
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop_here)
    try:
        options.action(options)
    except SandboxError as error:
        tell(f"error: {error}")
        return 1
    except BrokenPipeError:
        sys.stdout = None  # nobody reads on; no second complaint at exit
    except KeyboardInterrupt:
        tell("interrupted")
        return 130
    return 0
