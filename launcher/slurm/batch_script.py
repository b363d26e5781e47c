"""The batch script as text, with comments that say what its job does."""

import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.config.program import find_program
from launcher.errors import UsageError
from launcher.launch.job import JobSpec
from launcher.runs.run_directory import RunDir
from launcher.runs.secrets import mask_variables, mask_words
from launcher.slurm.attempt import Attempt
from launcher.slurm.job_options import Option
from launcher.slurm.job_request import make_job_request
from launcher.slurm.node_step import describe_node_step
from launcher.slurm.srun import render_step

STARTERS = {
    "direct": "launch on each node",
    "torchrun": "torchrun on each node",
}
"""What starts the ranks, by the agent's kind."""

SCRIPT = "submission.sh"
"""Its file in the run directory."""
MODULE = "launcher.slurm"
SHEBANG = "#!/bin/bash"
END_MARK = "END_OF_JOB"
"""Ends the document in a script; a line of JSON is never that."""
SETUP = """\
# cluster.setup: a line that fails ends the job
trap 'launch_code=$?; printf "launch: error: cluster.setup ended with %s at: %s\\n" \\
    "$launch_code" "$launch_line" >&2; exit "$((launch_code ? launch_code : 1))"' EXIT
launch_check() { if [ "$1" != 0 ]; then exit "$1"; fi; }
"""
SETUP_END = """\
trap - EXIT
unset -v launch_line launch_code
unset -f launch_check"""
EXAMPLE_HOSTS, EXAMPLE_RUN_DIR = "NODES", Path("RUN_DIR")
"""Stand for what is known once the job runs."""


@dataclass(frozen=True, slots=True)
class Script:
    """What the script of a job, or of a job array, is made of, whoever submits it."""

    options: tuple[Option, ...]
    remarks: tuple[str, ...]
    """What the job does, for people who read the script."""
    setup: tuple[str, ...]
    """The user's own lines of bash."""
    python: tuple[str, ...]
    """The interpreter of the submission, with its options."""

    @property
    def signal(self) -> str:
        """The checkpoint signal's name, as bash has it: of the option `B:USR2@120`."""
        value = next(option.value for option in self.options if option.name == "signal")
        return str(value).removeprefix("B:").partition("@")[0]


def render_script(script: Script, runs: Sequence[str]) -> str:
    """Return the script of a job whose run directory is there, or of an array with one for each member.

    Raises UsageError for a path that SLURM cannot take.
    """
    for run in runs:
        check_path(run)
    path = f"{runs[0].replace('%', '%%')}/logs/slurm-%j.out" if len(runs) == 1 else "/dev/null"
    lines = [*render_header(script, path), "", *choose_run(runs), *render_setup(script.setup)]
    lines += ["", *render_exec(script, '"$launch_run"')]
    return "\n".join(lines) + "\n"


def render_standalone(script: Script, document: str) -> str:
    """Return the script of a job whose run directory is made once it starts, from `document`, JSON.

    SLURM's own output file is where `sbatch` is called, and has what comes before there is a run directory.
    """
    is_array = any(option.name == "array" for option in script.options)
    path = "%x-%A_%a.out" if is_array else "%x-%j.out"
    lines = [*render_header(script, path), *render_setup(script.setup), ""]
    lines += render_exec(script, "--standalone", f"<<'{END_MARK}'")
    return "\n".join([*lines, document, END_MARK]) + "\n"


def render_header(script: Script, output: str) -> list[str]:
    """Write the remarks and the options, the log's among them, and let the shell survive the job's signal."""
    log = (Option("open-mode", "append", "run_dir"), Option("output", output, "run_dir"))
    lines = [SHEBANG, *map(render_remark, script.remarks), *map(render_option, (*script.options, *log))]
    lines += ["", "# the checkpoint signal, if it comes before the ranks", "launch_signal="]
    return [*lines, f"trap 'launch_signal={script.signal}' {script.signal}"]


def render_remark(text: str) -> str:
    """Write a comment of one line, which holds nothing that could end it."""
    return "# " + "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def check_path(path: str) -> None:
    """Raise UsageError for what `--output` cannot hold: a backslash there means that `%j` is no pattern."""
    if "\\" in path or not path.isprintable():
        raise UsageError(
            f"the run directory {path!r} has a character that SLURM's --output cannot have: set runs_dir=DIR"
            " and name=NAME without backslashes, line breaks and the like"
        )


def render_option(option: Option) -> str:
    """Write an option as sbatch reads it: in double quotes if it has any but plain characters.

    sbatch splits at white space, takes `#` for a comment and the word hetjob for a separator, and knows
    backslashes before quotes and backslashes.
    """
    text = option.render()
    name, equals, value = text.partition("=")
    plain = all(char.isalnum() or char in "-_.,:/@%+=[]()*&|~^" for char in value) and "job" not in value
    if plain:
        return f"#SBATCH {text}"
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH {name}{equals}"{quoted}"'


def choose_run(runs: Sequence[str]) -> list[str]:
    """Set the run directory; a member of an array picks its own, and its log: SLURM has one path for all."""
    if len(runs) == 1:
        return [f"launch_run={shlex.quote(runs[0])}"]
    return [
        "launch_runs=(",
        *(f"    {shlex.quote(run)}" for run in runs),
        ")",
        "launch_run=${launch_runs[$SLURM_ARRAY_TASK_ID]}",
        'exec >>"$launch_run/logs/slurm-$SLURM_JOB_ID.out" 2>&1',
    ]


def render_setup(setup: Sequence[str]) -> list[str]:
    """Write the user's lines as they are, each followed by a look at how it ended."""
    if not setup:
        return []
    lines = ["", *SETUP.splitlines()]
    for line in join_continued_lines(setup):
        lines += [f"launch_line={shlex.quote(line)}", line, "launch_check $?"]
    return [*lines, *SETUP_END.splitlines()]


def join_continued_lines(setup: Sequence[str]) -> list[str]:
    """Return the lines, with those together that end in a backslash and go on in the next."""
    joined: list[str] = []
    goes_on = False
    for line in setup:
        joined = [*joined[:-1], f"{joined[-1]}\n{line}"] if goes_on else [*joined, line]
        goes_on = (len(line) - len(line.rstrip("\\"))) % 2 == 1
    return joined


def render_exec(script: Script, words: str, document: str = "") -> list[str]:
    """Replace the shell by `python -m launcher.slurm`, with the submission's interpreter in any environment.

    `words` are what follows in the line, as bash reads them, before the signal that the shell got.
    """
    path, program = script.python[0], shlex.quote(script.python[0])
    missing = f"launch: error: no {path} on this node: is it on a filesystem that all nodes share?"
    return [
        f"if [ ! -x {program} ]; then",
        f"    printf '%s\\n' {shlex.quote(missing)} >&2",
        "    exit 3",
        "fi",
        f"trap '' {script.signal}",
        f"exec {shlex.join(script.python)} -m {MODULE} {words} $launch_signal {document}".rstrip(),
    ]


def check_syntax(text: str, setup: Sequence[str]) -> None:
    """Raise UsageError if the user's lines make a script that bash cannot read."""
    if not setup:
        return
    done = subprocess.run(
        ["bash", "-n"],
        input=os.fsencode(text),
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        complaint = " ".join(done.stderr.decode(errors="replace").split())
        raise UsageError(
            f"cluster.setup={list(setup)} is no valid bash ({complaint}): each entry is a whole command"
        )


def describe_jobs(specs: Sequence[JobSpec], argv: Sequence[str]) -> tuple[str, ...]:
    """Return the lines for a job, or for the members of an array; secrets are masked."""
    lines = [f"Made by: {shlex.join(mask_words(['launch', *argv]))}"]
    for number, spec in enumerate(specs):
        lines += [f"Member {number} of the array:"] if len(specs) > 1 else []
        lines += describe_member(spec)
    return tuple(lines)


def describe_member(spec: JobSpec) -> Iterator[str]:
    """Give what one job runs, by which command on its nodes, and with which variables."""
    words = find_program(spec.program, spec.config, spec.environ)
    agent = STARTERS[spec.agent.kind]
    yield f"Program: {shlex.join(mask_words(words))} (ranks are started by {agent}, in {Path.cwd()})"
    yield f"Step: {shlex.join(mask_words(render_step_example(spec)))}"
    if spares := spec.config.cluster.spares:
        nodes = spec.cluster.max_nodes
        yield f"Spare nodes: {spares} of {nodes + spares} (they wait, and replace nodes that are lost)"
    variables = (f"{name}={shlex.quote(value)}" for name, value in mask_variables(spec.config.env).items())
    yield f"Variables: those of the shell that submits, and {' '.join(variables) or 'no others'}"


def render_step_example(spec: JobSpec) -> tuple[str, ...]:
    """Return srun's command, as the job's first node runs it, with what is known before."""
    request = make_job_request(spec, ())
    hosts = (EXAMPLE_HOSTS,) * spec.cluster.max_nodes
    spares = (EXAMPLE_HOSTS,) * spec.config.cluster.spares
    run = RunDir(EXAMPLE_RUN_DIR)
    step = describe_node_step(Attempt(request, run, os.environ, hosts, {}, requeues=True, spares=spares))
    return tuple(word for word in render_step(step) if not word.startswith("--nodelist="))
