"""The program's own option for its micro-batch, among its arguments or in the section `program`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.launch.job import JobSpec
from launcher.runs.secrets import mask_words
from launcher.text import join_words

if TYPE_CHECKING:
    from launcher.config.compose import Composed

KNOWN = (
    "--micro-batch-size",
    "--micro_batch_size",
    "--per-device-train-batch-size",
    "--per_device_train_batch_size",
    "--train-batch-size",
    "--train_batch_size",
    "--batch-size",
    "--batch_size",
    "batch_size=",
)
"""Options that are recognized among a program's arguments, if tune.option names none."""
PREFIX = "program."
"""Of keys of the configured program."""
OF_A_SEARCH = ("save", "format", "new_run_dir")
"""Settings beside `tune` that a search alone has."""


@dataclass(frozen=True, slots=True)
class BatchOption:
    """Where a size is put."""

    name: str
    """`--batch-size`, `train.batch_size=`, or the key `program.batch_size`."""
    is_key: bool
    """It is a key of the configuration, which becomes the program's argument."""
    start: int | None
    """The size that is given now; None if there is none."""

    def specify(self, composed: "Composed", spec: JobSpec, batch: int) -> JobSpec:
        """Return a job with that size; a key is set in the configuration, from which trials are resolved."""
        if spec.program is None:
            composed.tree.program[self.name.removeprefix(PREFIX)] = batch
            return spec
        return replace(spec, program=set_argument(spec.program, self.name, batch))

    def render(self, batch: int) -> str:
        """Return the argument as it is typed."""
        return f"{self.name}{'' if self.name.endswith('=') else '=' if self.is_key else ' '}{batch}"


def find_batch_option(spec: JobSpec) -> BatchOption:
    """Return the option that tune.option names, or that is known; raises UsageError."""
    name = spec.config.tune.option
    if spec.program is None:
        return find_program_key(spec, name or f"{PREFIX}batch_size")
    if name is not None and name.startswith(PREFIX) and not name.endswith("="):
        raise UsageError(f"tune.option={name} is a key of the configured program: name the program's option")
    if name is None:
        known = [option for option in KNOWN if read_argument(spec.program, option) is not None]
        if not known:
            raise UsageError(
                "which option of the program sets its micro-batch? Name it: tune.option=--batch-size, or"
                " tune.option=train.batch_size= for a program of Hydra's"
            )
        name = known[0]
    text = read_argument(spec.program, name)
    return BatchOption(name, is_key=False, start=parse_size(text))


def find_program_key(spec: JobSpec, name: str) -> BatchOption:
    """Return the option that is a key of the configured program; raises UsageError."""
    key = name.removeprefix(PREFIX)
    values = spec.config.program
    if not name.startswith(PREFIX) or key not in values:
        program = f"program={spec.choices.get('program', '')}"
        raise UsageError(
            f"tune.option={name}: {program} has no such key, name one that its file has, as in"
            f" tune.option={PREFIX}batch_size"
        )
    return BatchOption(name, is_key=True, start=parse_size(str(values[key])))


def parse_size(text: str | None) -> int | None:
    """Return a size of at least 1; None for anything else."""
    number = int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else 0
    return number or None


def read_argument(program: Sequence[str], name: str) -> str | None:
    """Return the last value of an option among a program's arguments; None if it is not there."""
    found = None
    for at, word in enumerate(program):
        if name.endswith("=") and word.startswith(name):
            found = word.removeprefix(name)
        elif word == name and at + 1 < len(program):
            found = program[at + 1]
        elif word.startswith(f"{name}="):
            found = word.removeprefix(f"{name}=")
    return found


def set_argument(program: Sequence[str], name: str, batch: int) -> tuple[str, ...]:
    """Return a program's arguments with an option set: where it stands, each time, or else at the end."""
    words, at = list(program), 0
    joined = name if name.endswith("=") else f"{name}="
    found = False
    while at < len(words):
        if words[at].startswith(joined):
            words[at], found = f"{joined}{batch}", True
        elif words[at] == name and at + 1 < len(words):
            words[at + 1], found = str(batch), True
            at += 1
        at += 1
    new = () if found else (f"{name}{batch}",) if name.endswith("=") else (name, str(batch))
    return (*words, *new)


def describe_command(spec: JobSpec, option: BatchOption, batch: int, argv: Sequence[str]) -> str:
    """Return the command that uses a size, with the settings of `launch tune batch` itself."""
    settings = list_settings(argv, option)
    if spec.program is None:
        return f"launch {join_words([*settings, option.render(batch)])}"
    program = mask_words(set_argument(spec.program, option.name, batch))
    return f"launch {join_words([*settings, '--', *program])}"


def list_settings(argv: Sequence[str], option: BatchOption) -> list[str]:
    """List the settings of a command line `tune batch KEY=VALUE … PROGRAM …` that its later runs need too."""
    words = dropwhile(lambda word: word in ("tune", "batch"), argv)
    settings = takewhile(lambda word: "=" in word and not word.startswith("-"), words)
    return mask_words(
        [
            word
            for word in settings
            if (key := word.partition("=")[0].lstrip("+~")) not in (*OF_A_SEARCH, option.name)
            and not key.startswith("tune.")
        ]
    )
