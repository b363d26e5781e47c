"""`launch-rank`: puts this process where its rank belongs, then becomes the user's program."""

import os
import sys
from _signal import (  # type: ignore[import-not-found]  # `signal` costs 4 ms
    SIG_DFL,
    SIG_IGN,
    SIGINT,
    SIGPIPE,
    SIGUSR1,
    SIGUSR2,
    default_int_handler,
    getsignal,
    signal,
)

from launcher.protocol import (
    LAUNCH_AGENT,
    LAUNCH_ATTEMPT,
    LAUNCH_NUM_WORKERS,
    LAUNCH_PLAN,
    LAUNCH_QUIET,
    LAUNCH_RANK_PLAN,
    LAUNCH_RDZV_ID,
    LAUNCH_RECORD_DIR,
    LAUNCH_REQUEST,
    LAUNCH_ROLE,
    LAUNCH_RUN_DIR,
    LAUNCH_SIGNAL,
    LAUNCH_STRICT,
    LAUNCH_TERMINAL,
    find_chosen,
)
from launcher.rank.apply import Applied
from launcher.rank.assignment import NoShareError, find_share
from launcher.rank.identity import SRUN, Identity, is_number, read_number
from launcher.rank.interpreter_hook import add_hook, is_hooked, is_wanted, remove_hook
from launcher.rank.open_files import raise_files
from launcher.rank.program_kind import add_python, locate, run_script
from launcher.rank.rank_record import describe_line, redirect_output, shorten, write_records

OURS = (
    LAUNCH_PLAN,
    LAUNCH_RECORD_DIR,
    LAUNCH_ATTEMPT,
    LAUNCH_STRICT,
    LAUNCH_AGENT,
    LAUNCH_REQUEST,
    LAUNCH_ROLE,
    LAUNCH_RDZV_ID,
    LAUNCH_SIGNAL,
    LAUNCH_TERMINAL,
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
)
"""What `launch` tells the shim and torchrun: nothing to the program, nor to jobs that it starts itself."""
NOT_FOUND, NOT_EXECUTABLE, NOT_PLACED, USAGE = 127, 126, 3, 2
"""Exit codes: a shell's own for a program that is not there or cannot be run; ours for the rest."""
WORKERS = "2"
"""For `{num_workers}` where there is no plan: what mostly suffices."""
LOCAL_RANK_FIX = "deepspeed adds it; give deepspeed --no_local_rank, and the program has LOCAL_RANK"
HIDDEN_GPUS = (
    "this task sees fewer GPUs than the node has tasks, so that there may be no cuda:LOCAL_RANK:"
    " use srun --gpus-per-node, not --gpus-per-task"
)
ENOEXEC = 8
LONGEST = 1000
"""Characters of a line of ours."""


def main() -> int:
    """Entry point of `launch-rank`; returns only where the program could not be started."""
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        from launcher.rank.usage import HELP

        emit(1, HELP)
        return 0
    if words and words[0].startswith("-") and words[0] != "--":
        hint = LOCAL_RANK_FIX if "local" in words[0] else "see launch-rank --help"
        say(f"unknown option {words[0]}: {hint}")
        return USAGE
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        say("no program given: launch-rank [--] program [argument ...]")
        return USAGE
    if getsignal(SIGINT) is default_int_handler:
        signal(SIGINT, SIG_DFL)  # Ctrl-C ends this process as it would end the program, without a traceback
    return run_rank(words, dict(os.environ))


def run_rank(words: list[str], environ: dict[str, str]) -> int:
    """Place this rank and become its program; returns an exit code where that cannot be started."""
    kept = read_number(environ, LAUNCH_SIGNAL)
    if kept:
        signal(kept, SIG_IGN)
    if LAUNCH_RANK_PLAN in environ:
        from launcher.rank.nested_rank import leave_rank

        leave_rank(environ)
    identity = Identity(environ)
    named, status = name_rank(identity, environ)
    if status:
        return status
    if environ.get(LAUNCH_RECORD_DIR):
        attach_run(identity, environ[LAUNCH_RECORD_DIR])
    try:
        words = place_rank(identity, environ, words)
    except Exception as error:  # whatever goes wrong here, a job that would have run without us still runs
        reason = error if isinstance(error, NoShareError) else f"{type(error).__name__}: {error}"
        say(f"rank {identity.rank} is not placed: {reason}")
        if environ.get(LAUNCH_STRICT) == "1":
            return NOT_PLACED
        workers = environ.get(LAUNCH_NUM_WORKERS, "")
        words = fill_words(words, workers if is_number(workers) else WORKERS, environ)
    if problem := raise_files():
        say(f"rank {identity.rank}: {problem}")
    environ.update(named)
    settle_signals(environ, kept)
    return become_program(words, environ)


def name_rank(identity: Identity, environ: dict[str, str]) -> tuple[dict[str, str], int]:
    """Return the variables that make a rank of srun's task, and an exit code where it cannot be one.

    `LAUNCH_AGENT=srun` asks for all of torchrun's. Without it, a task gets those that torch.distributed reads
    if nothing has set RANK: by TORCHELASTIC_RUN_ID, frameworks would take another way than under srun.
    """
    is_asked = environ.get(LAUNCH_AGENT) == "srun"
    if not is_asked and ("RANK" in environ or identity.family != SRUN):
        return {}, 0
    from launcher.rank.srun_task import PORT_TAKEN, can_serve, hides_gpus, name_meeting, name_task

    named = name_task(identity, environ)
    if is_asked:
        if not named:
            say("LAUNCH_AGENT=srun is set, but this is no task of srun's: RANK and the like are not set")
        return named, PORT_TAKEN if named and not can_serve(identity, environ) else 0
    if named and hides_gpus(identity, environ):
        if identity.local_rank == 0:
            say(f"RANK and the like are not set: {HIDDEN_GPUS}")
        return {}, 0
    named = {name: value for name, value in named.items() if not name.startswith("TORCHELASTIC_")}
    return {**named, **name_meeting(environ)} if named else {}, 0


def judge_hook(words: list[str], environ: dict[str, str]) -> str:
    """Take the hook out if the program's Python would not start it, and return why; empty if it would."""
    if not is_hooked(environ):
        return ""
    from launcher.rank.interpreter import find_deafness

    try:
        reason = find_deafness(add_python(words), environ)
    except (OSError, ValueError):  # the start will tell
        return ""
    if reason:
        remove_hook(environ)
    return reason


def settle_signals(environ: dict[str, str], kept: int) -> None:
    """Leave to the program the signals as it is to find them; an ignored one stays ignored over exec.

    The interpreter ignores SIGPIPE at its start, and `launch` has its agent ignore the user signals, which
    SLURM sends to every process of a step. Where srun is the agent, the checkpoint signal (`kept`) comes to
    every process as well: those that have no handler for it are to live on.
    """
    for number in (SIGPIPE, SIGUSR1, SIGUSR2) if LAUNCH_RECORD_DIR in environ else (SIGPIPE,):
        signal(number, SIG_DFL)
    if kept:
        signal(kept, SIG_IGN)


def attach_run(identity: Identity, run_dir: str) -> None:
    """Tie the rank's life to its agent's, and send its output to its log files."""
    try:
        from launcher.rank.parent_death import end_with_agent

        end_with_agent()
    except (ImportError, OSError) as error:
        say(f"rank {identity.rank} may outlive its agent ({error})")
    try:
        redirect_output(run_dir, identity)
    except OSError as error:
        say(f"rank {identity.rank} has no log files ({error}): its output goes to the agent's log")
    if terminal := os.environ.get(LAUNCH_TERMINAL):
        from launcher.rank.controlling_terminal import take_terminal

        try:
            take_terminal(terminal)
            identity.has_terminal = True
        except (ImportError, OSError, ValueError) as error:
            say(f"rank {identity.rank} has no terminal ({error}): its output goes to its log files")


def place_rank(identity: Identity, environ: dict[str, str], words: list[str]) -> list[str]:
    """Apply the rank's share and record it; put its variables into `environ`, and return the words to run."""
    share = find_share(identity, environ, words)
    applied = Applied(share)
    for problem in applied.problems:
        say(f"rank {identity.rank}: {problem}")
    if applied.problems and environ.get(LAUNCH_STRICT) == "1":
        raise NoShareError("LAUNCH_STRICT=1 is set, and the placement is not as it should be")
    before = find_chosen(environ, share.env)
    environ.update(share.env)
    add_hook(environ, share, before, applied.cpus_before)
    words = fill_words(words, str(share.num_workers), environ)
    deafness = judge_hook(words, environ)
    if environ.get(LAUNCH_QUIET) != "1":
        for warning in share.advice:
            say(f"warning: {warning}")
        emit(2, describe_line(identity, share, applied, environ) + "\n")
        if deafness and identity.local_rank == 0 and is_wanted(environ, share):
            say(f"{deafness}: garbage collection and DataLoaders stay as Python and PyTorch have them")
    if run_dir := environ.get(LAUNCH_RECORD_DIR):
        try:
            write_records(run_dir, identity, share, applied)
        except OSError as error:
            say(f"rank {identity.rank}: there is no record of what was applied ({error})")
    return words


def fill_words(words: list[str], workers: str, environ: dict[str, str]) -> list[str]:
    """Put the number of DataLoader workers and the run directory into the arguments that ask for them.

    Without `launch` there is no run directory, unless LAUNCH_RUN_DIR names one: then `{run_dir}` stays.
    """
    words = [word.replace("{num_workers}", workers) for word in words]
    run_dir = environ.get(LAUNCH_RUN_DIR)
    if run_dir:
        return [word.replace("{run_dir}", run_dir) for word in words]
    if any("{run_dir}" in word for word in words):
        say("{run_dir} stays as it is: LAUNCH_RUN_DIR, which `launch` sets, names no directory")
    return words


def become_program(words: list[str], environ: dict[str, str]) -> int:
    """Exec the program; the PID stays, so signals reach it. Returns a shell's exit code if that fails."""
    for name in OURS if LAUNCH_RECORD_DIR in environ else ():
        environ.pop(name, None)
    try:
        words = add_python(words)
        try:
            os.execvpe(words[0], words, environ)
        except OSError as error:
            if error.errno != ENOEXEC:
                raise
            run_script(locate(words[0], environ), words, environ)
            raise
    except FileNotFoundError:
        say(f"{words[0]}: no such program: check the path, or that it is on PATH")
        return NOT_FOUND
    except (OSError, ValueError) as error:
        say(f"{words[0]} cannot be run ({error}): is it executable, with a right #! line?")
        return NOT_EXECUTABLE


def say(text: str) -> None:
    """Print one line to stderr; variables in it may hold anything."""
    emit(2, f"launch-rank: {shorten(text, LONGEST)}\n")


def emit(stream: int, text: str) -> None:
    """Write to a descriptor; a closed or full one is no reason not to run the program."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        while data:
            data = data[os.write(stream, data) :]
    except OSError:
        return
