"""The batch script as text, with comments that say what its job does."""

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.config.overrides import read_key
from launcher.errors import UsageError
from launcher.launch.job import JobSpec
from launcher.runs.secrets import MASK, mask_words
from launcher.slurm.job_options import Option

SCRIPT = "submission.sh"
"""Its file in the run directory."""
SHEBANG = "#!/bin/bash"
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
DECIDED = ("dry_run", "follow", "run_dir", "new_run_dir", "cluster.kind", "cluster.requeue.allocation")
"""Settings that the command line in the script of a dry run does not take over."""
CONFIG_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")


@dataclass(frozen=True, slots=True)
class Script:
    """What the script of a job, or of a job array, is made of, whoever submits it."""

    options: tuple[Option, ...]
    remark: str
    """Where it is from, for people who read the script."""
    setup: tuple[str, ...]
    """The user's own lines of bash."""
    python: tuple[str, ...]
    """The interpreter of the submission, with its options."""

    @property
    def signal(self) -> str:
        """The checkpoint signal's name, as bash has it: of the option `B:USR2@120`."""
        value = next(option.value for option in self.options if option.name == "signal")
        return str(value).removeprefix("B:").partition("@")[0]


@dataclass(frozen=True, slots=True)
class Member:
    """One job in the script of a dry run."""

    run: str
    """Its run directory, or a path beside it."""
    is_resumed: bool
    """The user has chosen the run directory; else the job's number names it."""
    words: tuple[str, ...]
    """Settings, and flags of the configuration, as bash reads them."""
    program: tuple[str, ...]
    """The same for the program and its arguments; empty for the configured one."""
    secrets: tuple[str, ...]
    """Variables that the job needs, in place of what must not be written down."""


def render_script(script: Script, runs: Sequence[str]) -> str:
    """Return the script of a job whose run directory is there, or of an array with one for each member.

    Raises UsageError for a path that SLURM cannot take.
    """
    for run in runs:
        check_path(run)
    path = f"{runs[0].replace('%', '%%')}/logs/slurm-%j.out" if len(runs) == 1 else "/dev/null"
    lines = [*render_header(script, path), ""]
    lines += ["# the checkpoint signal, if it comes before the ranks", "launch_signal="]
    lines += [f"trap 'launch_signal={script.signal}' {script.signal}"]
    if len(runs) == 1:
        lines += [f"launch_run={shlex.quote(runs[0])}"]
    else:  # a member picks its own, and its log: SLURM has one path for all
        lines += ["launch_runs=(", *(f"    {shlex.quote(run)}" for run in runs), ")"]
        lines += ["launch_run=${launch_runs[$SLURM_ARRAY_TASK_ID]}"]
        lines += ['exec >>"$launch_run/logs/slurm-$SLURM_JOB_ID.out" 2>&1']
    lines += [*render_setup(script.setup), "", *check_interpreter(script), f"trap '' {script.signal}"]
    lines += [f'exec {shlex.join(script.python)} -m launcher.slurm "$launch_run" $launch_signal'.rstrip()]
    return "\n".join(lines) + "\n"


def render_dry_run(script: Script, members: Sequence[Member], directory: str) -> str:
    """Return the script of a dry run: options, and the command line that runs the job in its allocation.

    The job's number names the run directory. SLURM's output file is where the command was given.
    """
    output = "%x-%j.out" if len(members) == 1 else "%x-%A_%a.out"
    script = replace(script, options=(*script.options, Option("chdir", directory, "directory")))
    lines = [*render_header(script, output), f"trap : {script.signal}", *render_setup(script.setup), ""]
    lines += check_interpreter(script)
    for number, member in enumerate(members):
        lines += [f"if [ $SLURM_ARRAY_TASK_ID = {number} ]; then"] if len(members) > 1 else []
        lines += [
            f': "${{{name}:?the script leaves it out: export it before sbatch}}"' for name in member.secrets
        ]
        lines += [f"launch_run={shlex.quote(member.run)}"]
        if not member.is_resumed:
            job = "$SLURM_JOB_ID" if len(members) == 1 else "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
            lines[-1] = f"launch_run={shlex.quote(str(Path(member.run).parent))}/job-{job}"
        lines += ["launch_key=run_dir", '[ -e "$launch_run/manifest.json" ] || launch_key=new_run_dir']
        command = " \\\n    ".join(
            [f"exec {shlex.join(script.python)} -m launcher {' '.join(member.words)}"]
            + ['cluster.kind=allocation cluster.requeue.allocation=true "$launch_key=$launch_run"']
            + ([f"-- {' '.join(member.program)}"] if member.program else [])
        )
        lines += [command, *(["fi"] if len(members) > 1 else [])]
    return "\n".join(lines) + "\n"


def describe_member(spec: JobSpec, argv: Sequence[str]) -> Member:
    """Return what the script of a dry run has of one job, with variables in place of secrets."""
    secrets: list[str] = []
    words = []  # those that say where the configuration is, and settings
    for before, word in zip(["", *argv], argv, strict=False):
        if before in CONFIG_FLAGS:
            words.append(f"{before} {shlex.quote(word)}")
        elif "=" in word and word.partition("=")[0] in CONFIG_FLAGS:
            words.append(shlex.quote(word))
    for word in spec.overrides:
        key = read_key(word)
        if key in DECIDED:
            continue
        if mask_words([word]) == [word]:
            words.append(shlex.quote(word))
        elif key.startswith("env."):
            secrets.append(key.removeprefix("env."))  # the environment goes along
        else:
            secrets.append(re.sub(r"\W", "_", key).upper())
            words.append(f'{shlex.quote(key)}="${secrets[-1]}"')
    program = []
    for word, shown in zip(spec.program or (), mask_words(spec.program or ()), strict=True):
        if word != shown:
            secrets.append(f"SECRET_{len(secrets) + 1}")
            begin = shown.removesuffix(MASK)
            begin = shlex.quote(begin) if begin and word.startswith(begin) else ""
            program.append(f'{begin}"${secrets[-1]}"')
        else:
            program.append(shlex.quote(word))
    run = str(spec.run_path)
    return Member(run, spec.run_key != "runs_dir", tuple(words), tuple(program), tuple(secrets))


def render_header(script: Script, output: str) -> list[str]:
    """Write the remark and the options, the log's among them."""
    log = (Option("open-mode", "append", "run_dir"), Option("output", output, "run_dir"))
    # A comment of one line holds nothing that could end it.
    remark = "".join(char if char.isprintable() else repr(char)[1:-1] for char in script.remark)
    return [SHEBANG, f"# {remark}", *map(render_option, (*script.options, *log))]


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


def render_setup(setup: Sequence[str]) -> list[str]:
    """Write the user's lines as they are, each followed by a look at how it ended."""
    if not setup:
        return []
    lines = ["", *SETUP.splitlines()]
    for line in setup:
        lines += [f"launch_line={shlex.quote(line)}", line, "launch_check $?"]
    return [*lines, *SETUP_END.splitlines()]


def check_interpreter(script: Script) -> list[str]:
    """Say if the submission's interpreter, which works in any environment, is not on this node."""
    path, program = script.python[0], shlex.quote(script.python[0])
    missing = f"launch: error: no {path} on this node: is it on a filesystem that all nodes share?"
    return [
        f"if [ ! -x {program} ]; then",
        f"    printf '%s\\n' {shlex.quote(missing)} >&2",
        "    exit 3",
        "fi",
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
