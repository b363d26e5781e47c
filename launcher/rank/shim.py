"""`launch-rank`: puts this process where its rank belongs, then becomes the user's program."""

import os
import sys

from launcher.protocol import (
    LAUNCH_AGENT,
    LAUNCH_ATTEMPT,
    LAUNCH_FIT,
    LAUNCH_MEMORY,
    LAUNCH_NUM_WORKERS,
    LAUNCH_PARENT,
    LAUNCH_PLAN,
    LAUNCH_QUIET,
    LAUNCH_RANK_PLAN,
    LAUNCH_RECORD_DIR,
    LAUNCH_RUN_DIR,
    LAUNCH_STRICT,
    LAUNCH_TERMINAL,
    LAUNCH_WATCH,
    find_user_set,
)
from launcher.rank.affinity import AppliedPlacement
from launcher.rank.command_line import add_python, exec_script, find_hook_obstacle, locate_command
from launcher.rank.identity import SRUN_LOCAL_RANK, Identity, is_number, read_number
from launcher.rank.interpreter_hook import add_hook, is_hook_wanted, is_hooked, leave_outer_rank, remove_hook
from launcher.rank.plan_entry import PlacementError, find_entry
from launcher.rank.process_setup import (
    end_with_parent,
    raise_open_files,
    reset_signals,
    restore_interrupt,
    take_terminal,
)
from launcher.rank.rank_record import describe_line, redirect_output, shorten_text, write_records

REMOVED = (
    LAUNCH_PARENT,
    LAUNCH_PLAN,
    LAUNCH_RECORD_DIR,
    LAUNCH_ATTEMPT,
    LAUNCH_STRICT,
    LAUNCH_AGENT,
    LAUNCH_TERMINAL,
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
)
"""Variables from `launch` for the shim and torchrun, which the program, and what it starts, do not get."""
NOT_FOUND, NOT_EXECUTABLE, NOT_PLACED, USAGE = 127, 126, 3, 2
"""Exit codes: the shell's for a program that is not there or cannot be run; ours for the rest."""
DEFAULT_WORKERS = "2"
"""For `{num_workers}` if there is no plan."""
LOCAL_RANK_FIX = "deepspeed adds it; give deepspeed --no_local_rank, and the program has LOCAL_RANK"
HIDDEN_GPUS = (
    "this task sees fewer GPUs than the node has tasks, so that there may be no cuda:LOCAL_RANK:"
    " use srun --gpus-per-node, not --gpus-per-task"
)
ENOEXEC = 8
MAX_LINE = 1000
"""Characters of a line of ours."""


def main() -> int:
    """Entry point of `launch-rank`; returns only if the program could not be started."""
    argv = sys.argv[1:]
    if argv[:1] in (["-h"], ["--help"]):
        from launcher.rank.usage import HELP

        write_descriptor(1, HELP)
        return 0
    if argv and argv[0].startswith("-") and argv[0] != "--":
        hint = LOCAL_RANK_FIX if "local" in argv[0] else "see launch-rank --help"
        print_notice(f"unknown option {argv[0]}: {hint}")
        return USAGE
    argv = argv[1:] if argv[:1] == ["--"] else argv
    if not argv:
        print_notice("no program given: launch-rank [--] program [argument ...]")
        return USAGE
    restore_interrupt()
    return run_rank(argv, dict(os.environ))


def run_rank(argv: list[str], environ: dict[str, str]) -> int:
    """Place this rank and become its program; returns an exit code if that cannot be started."""
    argv, status = prepare_rank(argv, environ)
    return status or exec_program(argv, environ)


def prepare_rank(argv: list[str], environ: dict[str, str]) -> tuple[list[str], int]:
    """Place this rank, and make `environ` its program's; returns that one's argv, and an exit code or 0."""
    if LAUNCH_RANK_PLAN in environ:
        leave_outer_rank(environ)
    identity = Identity(environ)
    rank_variables = find_rank_variables(identity, environ)
    if environ.get(LAUNCH_RECORD_DIR):
        attach_run(identity, environ[LAUNCH_RECORD_DIR], environ)
    try:
        argv = place_rank(identity, environ, argv)
    except Exception as error:  # whatever goes wrong here, a job that would have run without us still runs
        reason = error if isinstance(error, PlacementError) else f"{type(error).__name__}: {error}"
        print_notice(f"rank {identity.rank} is not placed: {reason}")
        if environ.get(LAUNCH_STRICT) == "1":
            return argv, NOT_PLACED
        workers = environ.get(LAUNCH_NUM_WORKERS, "")
        argv = fill_placeholders(argv, workers if is_number(workers) else DEFAULT_WORKERS, environ)
    if problem := raise_open_files():
        print_notice(f"rank {identity.rank}: {problem}")
    environ.update(rank_variables)
    reset_signals(is_launched=LAUNCH_RECORD_DIR in environ)
    return argv, drop_own_variables(environ)


def find_rank_variables(identity: Identity, environ: dict[str, str]) -> dict[str, str]:
    """Return the variables that make a rank of srun's task; empty if it is none, or is one already.

    `LAUNCH_AGENT=srun` asks for all of torchrun's. Without it, a task gets those that torch.distributed reads
    if nothing has set RANK: by TORCHELASTIC_RUN_ID, frameworks would take another way than under srun.
    """
    is_requested = environ.get(LAUNCH_AGENT) == "srun"
    if not is_requested and ("RANK" in environ or identity.family != SRUN_LOCAL_RANK):
        return {}
    from launcher.rank.srun_task import choose_master, hides_gpus, make_torchrun_variables

    variables = make_torchrun_variables(identity, environ)
    if is_requested:
        if not variables:
            print_notice(
                "LAUNCH_AGENT=srun is set, but this is no task of srun's: RANK and the like are not set"
            )
        return variables
    if variables and hides_gpus(identity, environ):
        if identity.local_rank == 0:
            print_notice(f"RANK and the like are not set: {HIDDEN_GPUS}")
        return {}
    read = {name: value for name, value in variables.items() if not name.startswith("TORCHELASTIC_")}
    return {**read, **choose_master(environ)} if read else {}


def attach_run(identity: Identity, run_dir: str, environ: dict[str, str]) -> None:
    """Tie the rank's life to its agent's, and send its output to its log files."""
    try:
        end_with_parent(read_number(environ, LAUNCH_PARENT, os.getppid()))
    except (ImportError, OSError) as error:
        print_notice(f"rank {identity.rank} may outlive its agent ({error})")
    try:
        redirect_output(run_dir, identity)
    except OSError as error:
        print_notice(f"rank {identity.rank} has no log files ({error}): its output goes to the agent's log")
    if terminal := environ.get(LAUNCH_TERMINAL):
        try:
            take_terminal(terminal)
            identity.has_terminal = True
        except (ImportError, OSError, ValueError) as error:
            print_notice(f"rank {identity.rank} has no terminal ({error}): its output goes to its log files")


def place_rank(identity: Identity, environ: dict[str, str], argv: list[str]) -> list[str]:
    """Apply the rank's entry of the plan and record it; set its variables, and return the program's argv."""
    entry = find_entry(identity, environ, argv)
    applied = AppliedPlacement(entry)
    for problem in applied.problems:
        print_notice(f"rank {identity.rank}: {problem}")
    if applied.problems and environ.get(LAUNCH_STRICT) == "1":
        raise PlacementError("LAUNCH_STRICT=1 is set, and the placement is not as it should be")
    env_before = find_user_set(environ, entry.env)
    environ.update(entry.env)
    add_hook(environ, entry, env_before, applied.cpus_before)
    argv = fill_placeholders(argv, str(entry.num_workers), environ)
    obstacle = remove_blocked_hook(argv, environ)
    if environ.get(LAUNCH_QUIET) != "1":
        for warning in entry.advice:
            print_notice(f"warning: {warning}")
        write_descriptor(2, describe_line(identity, entry, applied, environ) + "\n")
        if obstacle and identity.local_rank == 0 and is_hook_wanted(environ, entry):
            more = ", and nobody sees their steps" if LAUNCH_WATCH in environ else ""
            print_notice(
                f"{obstacle}: garbage collection and DataLoaders stay as Python and PyTorch have them{more}"
            )
    if run_dir := environ.get(LAUNCH_RECORD_DIR):
        try:
            write_records(run_dir, identity, entry, applied, environ)
        except OSError as error:
            print_notice(f"rank {identity.rank}: there is no record of what was applied ({error})")
    return argv


def remove_blocked_hook(argv: list[str], environ: dict[str, str]) -> str:
    """Remove the hook if the program's Python would not start it, and return why; empty if it would."""
    if not is_hooked(environ):
        return ""
    try:
        obstacle = find_hook_obstacle(add_python(argv), environ)
    except (OSError, ValueError):  # the start will tell
        return ""
    if obstacle:
        remove_hook(environ)
    return obstacle


def fill_placeholders(argv: list[str], workers: str, environ: dict[str, str]) -> list[str]:
    """Put the number of DataLoader workers and the run directory into the arguments that ask for them.

    Without `launch` there is no run directory, unless LAUNCH_RUN_DIR names one: then `{run_dir}` stays.
    """
    values = {"{num_workers}": workers, "{run_dir}": environ.get(LAUNCH_RUN_DIR) or "{run_dir}"}
    filled = [fill_argument(argument, values) for argument in argv]
    if values["{run_dir}"] == "{run_dir}" and filled != [
        fill_argument(argument, {**values, "{run_dir}": ""}) for argument in argv
    ]:
        print_notice("{run_dir} stays as it is: LAUNCH_RUN_DIR, which `launch` sets, names no directory")
    return filled


def fill_argument(argument: str, values: dict[str, str]) -> str:
    """Replace a placeholder that is an argument, or all after `OPTION=`; a path may follow it.

    `{{run_dir}}` stands for `{run_dir}`. Anything else, such as `${run_dir}` and JSON, stays as it is.
    """
    option, equals, word = ("", "", argument) if argument.startswith("{") else argument.partition("=")
    name, slash, path = word.partition("/")
    if name.startswith("{{") and name[1:-1] in values:
        name = name[1:-1]
    elif name in values:
        name = values[name]
    return option + equals + name + slash + path


def drop_own_variables(environ: dict[str, str]) -> int:
    """Remove what the program does not get from its environment; returns an exit code if it must not run."""
    environ.pop(LAUNCH_MEMORY, None)
    if is_hooked(environ) and LAUNCH_RECORD_DIR in environ:
        environ[LAUNCH_MEMORY] = environ[LAUNCH_RECORD_DIR]
    for name in REMOVED if LAUNCH_RECORD_DIR in environ else ():
        environ.pop(name, None)
    if not is_hooked(environ):
        environ.pop(LAUNCH_WATCH, None)
        if LAUNCH_FIT in environ:  # it would train in earnest
            print_notice("the program's Python would not load the hook that keeps its tensors fake")
            return NOT_PLACED
    return 0


def exec_program(argv: list[str], environ: dict[str, str]) -> int:
    """Exec the program; the PID stays, so signals reach it. Returns a shell's exit code if that fails."""
    try:
        argv = add_python(argv)
        try:
            os.execvpe(argv[0], argv, environ)
        except OSError as error:
            if error.errno != ENOEXEC:
                raise
            exec_script(locate_command(argv[0], environ), argv, environ)
            raise
    except FileNotFoundError:
        print_notice(f"{argv[0]}: no such program: check the path, or that it is on PATH")
        return NOT_FOUND
    except (OSError, ValueError) as error:
        print_notice(f"{argv[0]} cannot be run ({error}): is it executable, with a right #! line?")
        return NOT_EXECUTABLE


def print_notice(text: str) -> None:
    """Print one line to stderr; variables in it may hold anything."""
    write_descriptor(2, f"launch-rank: {shorten_text(text, MAX_LINE)}\n")


def write_descriptor(descriptor: int, text: str) -> None:
    """Write to a descriptor; a closed or full one is no reason not to run the program."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        return
