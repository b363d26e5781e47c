"""`launch-rank`: puts this process where its rank belongs, then becomes the user's program."""

import os
import sys
import time

from launcher import protocol
from launcher.cpulist import format_cpulist
from launcher.files import Descriptor, open_append, open_below, open_own, write_whole
from launcher.rank import hook
from launcher.rank.affinity import Applied
from launcher.rank.entry import (
    Identity,
    PlacementError,
    PlanEntry,
    dump_json,
    find_entry,
    is_number,
    read_number,
)

_signal = __import__("_signal")  # `signal` costs 4 ms
REMOVED = (
    protocol.LAUNCH_PARENT,
    protocol.LAUNCH_PLAN,
    protocol.LAUNCH_RECORD_DIR,
    protocol.LAUNCH_ATTEMPT,
    protocol.LAUNCH_STRICT,
    protocol.LAUNCH_TERMINAL,
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
)
"""Variables from `launch` for the shim and torchrun, which the program, and what it starts, do not get."""
NOT_FOUND, NOT_EXECUTABLE, NOT_PLACED, USAGE = 127, 126, 3, 2
"""Exit codes: the shell's for a program that is not there or cannot be run; ours for the rest."""
DEFAULT_WORKERS = "2"
"""For `{num_workers}` if there is no plan."""
LOCAL_RANK_FIX = "deepspeed adds it; give deepspeed --no_local_rank, and the program has LOCAL_RANK"
MAX_LINE = 1000
"""Characters of a line of ours."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""
MAX_ITEM = 80
"""Characters of one item in the line for people; a list of CPUs or of allocator settings can be long."""


def main() -> int:
    """Entry point of `launch-rank`; returns only if the program could not be started."""
    argv = sys.argv[1:]
    if argv[:1] in (["-h"], ["--help"]):
        with open(f"{os.path.dirname(__file__)}/usage.txt", encoding="utf-8") as file:
            _write_descriptor(1, file.read())
        return 0
    if argv and argv[0].startswith("-") and argv[0] != "--":
        hint = LOCAL_RANK_FIX if "local" in argv[0] else "see launch-rank --help"
        print_notice(f"unknown option {argv[0]}: {hint}")
        return USAGE
    argv = argv[1:] if argv[:1] == ["--"] else argv
    if not argv:
        print_notice("no program given: launch-rank [--] program [argument ...]")
        return USAGE
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        # Ctrl-C ends this process as it would end the program, without a traceback.
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    environ = dict(os.environ)
    argv, status = prepare_rank(argv, environ)
    return status or exec_program(argv, environ)


def prepare_rank(argv: list[str], environ: dict[str, str]) -> tuple[list[str], int]:
    """Place this rank, and make `environ` its program's; returns that one's argv, and an exit code or 0."""
    if protocol.LAUNCH_RANK_PLAN in environ:
        hook.leave_outer_rank(environ)
    identity = Identity(environ)
    rank_variables, notice = identity.list_variables(environ)
    if notice:
        print_notice(notice)
    is_launched = bool(environ.get(protocol.LAUNCH_RECORD_DIR))
    if is_launched:
        _attach_run(identity, environ[protocol.LAUNCH_RECORD_DIR], environ)
    try:
        argv = place_rank(identity, environ, argv)
    except Exception as error:  # whatever goes wrong here, a job that would have run without us still runs
        reason = error if isinstance(error, PlacementError) else f"{type(error).__name__}: {error}"
        print_notice(f"rank {identity.rank} is not placed: {reason}")
        if environ.get(protocol.LAUNCH_STRICT) == "1":
            return argv, NOT_PLACED
        workers = environ.get(protocol.LAUNCH_NUM_WORKERS, "")
        argv = _fill_placeholders(argv, workers if is_number(workers) else DEFAULT_WORKERS, environ)
    raise_open_files()
    environ.update(rank_variables)
    _reset_signals(is_launched=is_launched)
    environ.pop(protocol.LAUNCH_MEMORY, None)
    if hook.is_hooked(environ) and is_launched:
        environ[protocol.LAUNCH_MEMORY] = environ[protocol.LAUNCH_RECORD_DIR]
    for name in REMOVED if is_launched else ():
        environ.pop(name, None)
    if not hook.is_hooked(environ):
        environ.pop(protocol.LAUNCH_WATCH, None)
        if protocol.LAUNCH_FIT in environ:  # it would train in earnest
            print_notice("the program's Python would not load the hook that keeps its tensors fake")
            return argv, NOT_PLACED
    return argv, 0


def _attach_run(identity: Identity, run_dir: str, environ: dict[str, str]) -> None:
    """Tie the rank's life to its agent's, and send its output to its log files, or to a terminal.

    A terminal, `0,1,2:/dev/pts/5`, becomes this session's own, and the named streams lead to it: keys that
    are signals then go to this process's group.
    """
    try:
        import ctypes

        # SIGTERM when the parent dies, killed or not; it holds over exec. One that has died before is no
        # parent any more. A kernel that refuses leaves the rank to the agent's own shutdown.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(_signal.SIGTERM), 0, 0, 0)
        if os.getppid() != read_number(environ, protocol.LAUNCH_PARENT, os.getppid()):
            os._exit(128 + _signal.SIGTERM)
    except (ImportError, OSError) as error:
        print_notice(f"rank {identity.rank} may outlive its agent ({error})")
    try:
        with open_below(run_dir, protocol.LOGS, str(identity.attempt)) as folder:
            for descriptor, stream in ((1, "out"), (2, "err")):
                with open_append(folder, protocol.name_rank_log(identity.rank, stream)) as target:
                    os.dup2(target, descriptor)
    except OSError as error:
        print_notice(f"rank {identity.rank} has no log files ({error}): its output goes to the agent's log")
    names, _, path = environ.get(protocol.LAUNCH_TERMINAL, "").partition(":")
    try:
        if path:
            from fcntl import ioctl
            from termios import TIOCSCTTY

            with Descriptor(os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)) as terminal:
                ioctl(terminal, TIOCSCTTY, 0)
                for name in names.split(","):
                    os.dup2(terminal, int(name))
            identity.has_terminal = True
    except (ImportError, OSError) as error:
        print_notice(f"rank {identity.rank} has no terminal ({error}): its output goes to its log files")


def place_rank(identity: Identity, environ: dict[str, str], argv: list[str]) -> list[str]:
    """Apply the rank's entry of the plan and record it; set its variables, and return the program's argv."""
    entry = find_entry(identity, environ, argv)
    applied = Applied(entry)
    for problem in applied.problems:
        print_notice(f"rank {identity.rank}: {problem}")
    if applied.problems and environ.get(protocol.LAUNCH_STRICT) == "1":
        raise PlacementError("LAUNCH_STRICT=1 is set, and the placement is not as it should be")
    env_before = protocol.find_user_set(environ, entry.env)
    environ.update(entry.env)
    hook.add_hook(environ, entry, env_before, applied.cpus_before)
    argv = _fill_placeholders(argv, str(entry.num_workers), environ)
    obstacle = ""
    if hook.is_hooked(environ) and (obstacle := hook.find_hook_obstacle(argv, environ)):
        hook.remove_hook(environ)
    if environ.get(protocol.LAUNCH_QUIET) != "1":
        for warning in entry.advice:
            print_notice(f"warning: {warning}")
        _write_descriptor(2, _describe_rank(identity, entry, applied, environ) + "\n")
        if obstacle and identity.local_rank == 0 and hook.is_hook_wanted(environ, entry):
            more = ", and nobody sees their steps" if protocol.LAUNCH_WATCH in environ else ""
            print_notice(
                f"{obstacle}: garbage collection and DataLoaders stay as Python and PyTorch have them{more}"
            )
    if run_dir := environ.get(protocol.LAUNCH_RECORD_DIR):
        try:
            write_record(run_dir, identity, entry, applied, environ)
        except OSError as error:
            print_notice(f"rank {identity.rank}: there is no record of what was applied ({error})")
    return argv


def write_record(
    run_dir: str, identity: Identity, entry: PlanEntry, applied: Applied, environ: dict[str, str]
) -> None:
    """Write `rank-N.applied.json`, whose `pid` stays the program's, since the shim execs; raises OSError."""
    record = {
        "schema": 1,
        "host": protocol.name_host(environ),
        "rank": identity.rank,
        "local_rank": identity.local_rank,
        "attempt": identity.attempt,
        "pid": os.getpid(),
        "agent": os.getppid(),
        "time": time.time(),
        "has_terminal": identity.has_terminal,
        "cpus": format_cpulist(applied.cpus),
        "memory": {"policy": applied.policy, "nodes": format_cpulist(applied.nodes)},
        "gpu": entry.gpu,
        "num_workers": entry.num_workers,
        "env": entry.env,
        "problems": applied.problems,
    }
    with open_own(run_dir) as folder:
        write_whole(folder, protocol.name_applied_file(identity.rank), dump_json(record).encode() + b"\n")


def _describe_rank(identity: Identity, entry: PlanEntry, applied: Applied, environ: dict[str, str]) -> str:
    """Return the one line for people: what this rank has, `environ` being its program's environment."""
    memory = f"{applied.policy} node {format_cpulist(applied.nodes)}" if applied.nodes else applied.policy
    gc = (
        environ.get(protocol.LAUNCH_GC, "default").partition(",")[0] if hook.is_hooked(environ) else "default"
    )
    named = {
        "nic": environ.get(protocol.LAUNCH_NIC),
        "workers": str(entry.num_workers),
        "threads": environ.get("OMP_NUM_THREADS"),
        "gc": gc if gc != "default" else "",
        "allocator": environ.get("PYTORCH_CUDA_ALLOC_CONF") or environ.get("PYTORCH_ALLOC_CONF"),
        "malloc": entry.env.get("LD_PRELOAD", "").partition(":")[0].rpartition("/")[2],
    }
    parts = [f"rank {identity.rank}", f"cpus {format_cpulist(applied.cpus) or 'unknown'}", f"memory {memory}"]
    parts += [f"gpu {entry.gpu_label}"] if entry.gpu_label else []
    parts += entry.notes
    parts += [f"{name} {value}" for name, value in named.items() if value]
    return "launch-rank: " + ", ".join(shorten_text(part) for part in parts)


def _fill_placeholders(argv: list[str], workers: str, environ: dict[str, str]) -> list[str]:
    """Put the number of DataLoader workers and the run directory into the arguments that ask for them.

    A placeholder is an argument, or all after `OPTION=`; a path may follow it. `{{run_dir}}` stands for
    `{run_dir}`. Anything else, such as `${run_dir}` and JSON, stays as it is. Without `launch` there is no
    run directory, unless LAUNCH_RUN_DIR names one: then `{run_dir}` stays.
    """
    run_dir = environ.get(protocol.LAUNCH_RUN_DIR)
    values = {"{num_workers}": workers, "{run_dir}": run_dir or "{run_dir}"}
    filled, is_missing = [], False
    for argument in argv:
        option, equals, word = ("", "", argument) if argument.startswith("{") else argument.partition("=")
        name, slash, path = word.partition("/")
        is_missing = is_missing or (name == "{run_dir}" and not run_dir)
        name = name[1:-1] if name.startswith("{{") and name[1:-1] in values else values.get(name, name)
        filled.append(option + equals + name + slash + path)
    if is_missing:
        print_notice("{run_dir} stays as it is: LAUNCH_RUN_DIR, which `launch` sets, names no directory")
    return filled


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one, if that is allowed.

    Each tensor that a DataLoader worker hands over holds one (PyTorch's notes on multiprocessing). NCCL
    raises the limit to the hard one too, in processes that use it.
    """
    try:
        from resource import RLIMIT_NOFILE, getrlimit, setrlimit

        hard = getrlimit(RLIMIT_NOFILE)[1]
        setrlimit(RLIMIT_NOFILE, (hard, hard))
    except (ImportError, OSError, ValueError):
        return


def _reset_signals(*, is_launched: bool) -> None:
    """Give the program the signals as it would have them without us; an ignored one stays ignored over exec.

    The interpreter ignores SIGPIPE and SIGXFSZ at its start. `launch` has torchrun ignore the user signals,
    which SLURM sends to every process of a step, and blocks them itself; what has come until now is dropped.
    """
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    if is_launched:
        user_signals = (_signal.SIGUSR1, _signal.SIGUSR2)
        for number in user_signals:
            _signal.signal(number, _signal.SIG_IGN)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, user_signals)
        for number in user_signals:
            _signal.signal(number, _signal.SIG_DFL)


def exec_program(argv: list[str], environ: dict[str, str]) -> int:
    """Exec the program; the PID stays, so signals reach it. Returns a shell's exit code if that fails."""
    try:
        argv = hook.add_python(argv)
        os.execvpe(argv[0], argv, environ)
    except FileNotFoundError:
        print_notice(f"{argv[0]}: no such program: check the path, or that it is on PATH")
        return NOT_FOUND
    except (OSError, ValueError) as error:
        print_notice(f"{argv[0]} cannot be run ({error}): is it executable, with a right #! line?")
        return NOT_EXECUTABLE


def shorten_text(text: str, limit: int = MAX_ITEM) -> str:
    """Return a text on one line, harmless on a terminal, the middle of a long one left out."""
    if len(text) > 2 * limit:
        text = text[:limit] + text[-limit:]
    shown = text if text.isprintable() else repr(text)[1:-1]
    half = (limit - 1) // 2
    return shown if len(shown) <= limit else f"{shown[:half]}…{shown[-half:]}"


def print_notice(text: str) -> None:
    """Print one line to stderr; variables in it may hold anything."""
    _write_descriptor(2, f"launch-rank: {shorten_text(text, MAX_LINE)}\n")


def _write_descriptor(descriptor: int, text: str) -> None:
    """Write to a descriptor; a closed or full one is no reason not to run the program."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        return
