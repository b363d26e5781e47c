"""The command line, taken apart: verb, overrides, program."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import UsageError

VERBS = ("plan", "topo", "doctor", "tune", "status", "logs", "cancel")
"""Words that may stand first; without one, a command line runs a job."""
SUBJECTS = ("dataloader",)
"""What `tune` can tune."""
OF_RUNS = ("status", "logs", "cancel")
"""Verbs that take names of runs or numbers of jobs."""
FOLLOW = ("-f", "--follow")
"""`follow=true` as `tail` writes it, for `launch logs`."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, taken apart."""

    verb: str
    words: tuple[str, ...]
    """Overrides and Hydra's flags."""
    names: tuple[str, ...]
    """Runs and jobs, for the verbs that take them; what `tune` is to tune."""
    program: tuple[str, ...] | None
    """What stands after the first `--`; None where there is none."""


def parse_command(argv: Sequence[str]) -> Command:
    """Split a command line into verb, overrides and program; raises UsageError for an empty program."""
    words = list(argv)
    program = None
    if "--" in words:
        at = words.index("--")
        words, program = words[:at], tuple(words[at + 1 :])
        if not program:
            raise UsageError(
                "nothing stands after `--`: give a program, as in `launch -- train.py --lr 3e-4`"
            )
    verb = words.pop(0) if words and words[0] in VERBS else "run"
    check_verbs(verb, words)
    names: list[str] = []
    if verb in OF_RUNS:
        names = [word for word in words if "=" not in word and not word.startswith(("-", "~"))]
        words = ["follow=true" if word in FOLLOW else word for word in words if word not in names]
    if verb == "tune" and words and words[0].isalpha():
        names = [words.pop(0)]
    return Command(verb, tuple(words), tuple(names), program)


def check_verbs(verb: str, words: Sequence[str]) -> None:
    """Raise UsageError for a verb that does not stand first, and for a first word that is nearly one."""
    late = next((word for word in words if word in VERBS and verb not in OF_RUNS), None)
    if late and verb in VERBS:
        raise UsageError(f"{verb} and {late} are two verbs: give one, as in `launch {late}`")
    if late:
        raise UsageError(f"{late} is a verb, which stands first: launch {late} KEY=VALUE …")
    if verb not in VERBS and words and words[0].isalpha():
        import difflib

        near = difflib.get_close_matches(words[0].lower(), VERBS, n=1, cutoff=0.8)
        if near:
            raise UsageError(f"there is no verb {words[0]!r}: did you mean {near[0]}?")
