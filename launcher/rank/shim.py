"""`launch-rank`: puts this process where its rank belongs, then becomes the user's program."""

import os
import sys
from _signal import SIG_DFL, SIGPIPE, SIGUSR1, SIGUSR2, signal  # type: ignore[import-not-found]  # `signal` costs 4 ms

from launcher.rank.apply import Applied
from launcher.rank.identity import Identity
from launcher.rank.lifeline import end_with_agent
from launcher.rank.record import describe_line, redirect_output, write_applied
from launcher.rank.share import NoShareError, find_share

HELP = """\
usage: launch-rank [--] program [argument ...]

Binds this rank to the CPUs and memory next to its GPU, then execs the program. Put it before the program
in an existing job:

    torchrun --nproc-per-node=8 --no-python launch-rank python train.py
    srun --ntasks-per-node=8 --cpu-bind=none launch-rank python train.py
    mpirun --bind-to none -np 8 launch-rank python train.py

Each rank plans the whole node and takes its part, so srun and mpirun must not have bound it already.
The local rank comes from LOCAL_RANK, SLURM_LOCALID, OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID or
PALS_LOCAL_RANKID. `{num_workers}` in an argument becomes the rank's number of DataLoader workers.

    LAUNCH_PLAN=FILE       a plan printed by `launch plan format=json`; without it the node is planned here
    LAUNCH_BINDING=POLICY  the policy to plan with: exclusive (default), numa, socket, l3 or none
    LAUNCH_STRICT=1        end with status 3 where the placement cannot be applied (else: a warning)
    LAUNCH_QUIET=1         do not print the line that says what was applied
"""
OURS = ("LAUNCH_PLAN", "LAUNCH_RUN_DIR", "LAUNCH_ATTEMPT", "LAUNCH_STRICT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
"""What `launch` tells the shim and torchrun: nothing to the program, nor to jobs that it starts itself."""
NOT_FOUND, NOT_EXECUTABLE, NOT_PLACED, USAGE = 127, 126, 3, 2
"""Exit codes: a shell's own for a program that is not there or cannot be run; ours for the rest."""


def main() -> int:
    """Entry point of `launch-rank`; returns only where the program could not be started."""
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(HELP)
        return 0
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        say("no program given: launch-rank [--] program [argument ...]")
        return USAGE
    environ = dict(os.environ)
    identity = Identity(environ)
    if environ.get("LAUNCH_RUN_DIR"):
        end_with_agent()
        redirect_logs(identity, environ["LAUNCH_RUN_DIR"])
    try:
        words = place_rank(identity, environ, words)
    except Exception as error:  # whatever goes wrong here, a job that would have run without us still runs
        reason = error if isinstance(error, NoShareError) else f"{type(error).__name__}: {error}"
        say(f"rank {identity.rank} is not placed: {reason}")
        if environ.get("LAUNCH_STRICT") == "1":
            return NOT_PLACED
    return become_program(words, environ)


def redirect_logs(identity: Identity, run_dir: str) -> None:
    """Send the rank's output to its log files."""
    try:
        redirect_output(run_dir, identity)
    except OSError as error:
        say(f"rank {identity.rank} has no log files ({error}): its output goes to the agent's log")


def place_rank(identity: Identity, environ: dict[str, str], words: list[str]) -> list[str]:
    """Apply the rank's share and record it; put its variables into `environ`, and return the words to run."""
    share = find_share(identity, environ)
    applied = Applied(share)
    for problem in applied.problems:
        say(f"rank {identity.rank}: {problem}")
    if applied.problems and environ.get("LAUNCH_STRICT") == "1":
        raise NoShareError("LAUNCH_STRICT=1 is set and the kernel did not take the plan")
    if environ.get("LAUNCH_QUIET") != "1":
        sys.stderr.write(describe_line(identity, share, applied) + "\n")
    if run_dir := environ.get("LAUNCH_RUN_DIR"):
        try:
            write_applied(run_dir, identity, share, applied)
        except OSError as error:
            say(f"rank {identity.rank}: there is no record of what was applied ({error})")
    environ.update(share.env)
    return [word.replace("{num_workers}", str(share.num_workers)) for word in words]


def become_program(words: list[str], environ: dict[str, str]) -> int:
    """Exec the program; the PID stays, so signals reach it. Returns a shell's exit code if that fails."""
    sys.stderr.flush()
    under_launch = "LAUNCH_RUN_DIR" in environ
    for name in OURS if under_launch else ():
        environ.pop(name, None)
    # An ignored signal stays ignored over exec: the interpreter ignores SIGPIPE at its start, and `launch`
    # has its agent ignore the user signals, which SLURM sends to every process of a step.
    for number in (SIGPIPE, SIGUSR1, SIGUSR2) if under_launch else (SIGPIPE,):
        signal(number, SIG_DFL)
    try:
        os.execvpe(words[0], words, environ)
    except FileNotFoundError:
        say(f"{words[0]}: no such program: check the path, or that it is on PATH")
        return NOT_FOUND
    except (OSError, ValueError) as error:
        say(f"{words[0]} cannot be run ({error}): is it executable, with a right #! line?")
        return NOT_EXECUTABLE


def say(text: str) -> None:
    """Print one line to stderr."""
    sys.stderr.write(f"launch-rank: {text}\n")
