"""Splits the command line into verb, overrides and program."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.cli.verbs import VERBS, takes_names
from launcher.errors import UsageError

FOLLOW = ("-f", "--follow")
"""`follow=true` as `tail` writes it, for `launch logs`."""
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
"""A module's dotted name."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line's parts."""

    verb: str
    words: tuple[str, ...]
    """Overrides and Hydra's flags."""
    names: tuple[str, ...]
    """Runs, jobs and nodes, for the verbs that take them; what `tune` is to tune."""
    program: tuple[str, ...] | None
    """The program and its arguments; None if there is none."""
    tail: tuple[str, ...] = ()
    """The program as it stands on the command line, with a `--` before it if there is one."""


def parse_command(argv: Sequence[str]) -> Command:
    """Split a command line into verb, overrides and program; raises UsageError for an empty program."""
    words = list(argv)
    verb = words.pop(0) if words and words[0] in VERBS else "run"
    names: list[str] = []
    if verb in VERBS and VERBS[verb].subjects and words and words[0].isalpha():
        names = [words.pop(0)]
    if takes_names(verb):
        words = ["follow=true" if word in FOLLOW else word for word in words]
    groups = list(group_words(words, has_program=not takes_names(verb)))
    size = sum(map(len, groups))
    words, tail = words[:size], tuple(words[size:])
    program = tail[tail[0] == "--" :] if tail else None
    if program == ():
        raise UsageError("nothing stands after `--`: give a program, as in `launch -- ./train --lr 3e-4`")
    alone = [group[0] for group in groups if len(group) == 1]
    if takes_names(verb):
        names = [word for word in alone if "=" not in word and not word.startswith(("-", "~"))]
        words = [word for group in groups for word in group if len(group) == 2 or word not in names]
    else:
        check_verbs(verb, alone)
    return Command(verb, tuple(words), tuple(names), program, tail)


def group_words(argv: Sequence[str], *, has_program: bool = True) -> Iterator[tuple[str, ...]]:
    """Give the words before the program: an option together with its value, any other word alone.

    Without a program, `--` ends them.
    """
    at = 0
    while at < len(argv) and not (begins_program(argv[at : at + 2]) if has_program else argv[at] == "--"):
        size = 2 if takes_value(argv[at : at + 3]) else 1
        yield tuple(argv[at : at + size])
        at += size


def begins_program(words: Sequence[str]) -> bool:
    """Tell whether a program begins with the first of these words, which is no value of an option.

    A program begins with `--`, with `-m` before the name of a module (before anything else `-m` is Hydra's
    --multirun), or with a word that is a file or ends in .py. An override or a verb is no program, even if
    there is a file of that name.
    """
    word, *after = words
    if word == "-m":
        return bool(after) and is_module(after[0])
    if word == "--":
        return True
    if word.startswith(("-", "~")) or "=" in word or word in VERBS:
        return False
    return is_script(word)


def is_module(word: str) -> bool:
    """Tell whether a word after `-m` names a module, and neither a verb nor a script."""
    return bool(MODULE.fullmatch(word)) and word not in VERBS and not is_script(word)


def is_script(word: str) -> bool:
    """Tell whether a word names a program by itself: it ends in .py, or is a file."""
    try:
        return word.endswith(".py") or Path(word).is_file()
    except (OSError, ValueError):  # too long for a name
        return False


def takes_value(words: Sequence[str]) -> bool:
    """Tell whether the second of these words is the value of the first, an option."""
    option, *after = words
    if not option.startswith("-") or "=" in option or not after or after[0] == "--":
        return False
    from launcher.config.hydra_flags import takes_flag_value

    if (is_value := takes_flag_value(option, after[0])) is not None:
        return is_value
    return not after[0].startswith("-") and "=" not in after[0] and not begins_program(after)


def check_verbs(verb: str, words: Sequence[str]) -> None:
    """Raise UsageError for a verb that does not stand first, and for a first word that is nearly one."""
    late = next((word for word in words if word in VERBS), None)
    if late and verb in VERBS:
        raise UsageError(f"{verb} and {late} are two verbs: give one, as in `launch {late}`")
    if late:
        raise UsageError(
            f"{late} is a verb, which stands first: launch {late} KEY=VALUE … (a program: `launch -- {late}`)"
        )
    if verb not in VERBS and words and words[0].isalpha():
        import difflib

        near = difflib.get_close_matches(words[0].lower(), VERBS, n=1, cutoff=0.8)
        if near:
            raise UsageError(f"there is no verb {words[0]!r}: did you mean {near[0]}?")
