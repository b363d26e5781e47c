"""Refuses other tools' options and unknown words with the corrected command line."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields

from launcher.cli.arguments import Command, group_words
from launcher.cli.verbs import takes_program
from launcher.config.hydra_flags import find_flag_sources, make_parser, takes_flag_value
from launcher.config.other_tools import GPU_NAMES, VISIBLE, find_foreign, find_option
from launcher.config.overrides import read_key
from launcher.config.schema import LaunchConfig
from launcher.errors import UsageError
from launcher.runs.secrets import mask_words
from launcher.text import join_words

OWN_KEYS = {field.name: field for field in fields(LaunchConfig)}
"""Keys at the top of the configuration."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What is wrong with a word, or with an option and its value, and what to write instead."""

    problem: str
    words: tuple[str, ...] = ()
    """To write in its place."""
    options: tuple[str, ...] = ()
    """To write after the program, whose options these are."""
    environ: str = ""
    """To write before the command."""


def check_words(command: Command) -> None:
    """Raise UsageError for the words before the program that are neither settings nor flags."""
    groups = list(group_words(command.words))
    size = next((at for at, group in enumerate(groups) if is_stray(group)), len(groups))
    corrections = correct_groups(groups[:size], command.words)
    found = [each for each in corrections if each]
    stray = [word for group in groups[size:] for word in group]
    if not found and not stray:
        return
    words = [
        word
        for group, each in zip(groups, corrections, strict=False)
        for word in (each.words if each else group)
    ]
    tail = correct_tail(command, stray, [word for each in found for word in each.options])
    problems = [each.problem for each in found] or [describe_stray(command, stray[0])]
    raise UsageError(f"{'; '.join(problems)}: {render_corrected(command, found, words, tail)}")


def correct_groups(groups: Sequence[tuple[str, ...]], words: Sequence[str]) -> list[Correction | None]:
    """Return for each option and setting what to write instead; None for those that are ours.

    A configuration folder may hold a group that is named as another tool's option.
    """
    found = [correct_group(group) for group in groups]
    if not any(each and is_setting(group) for each, group in zip(found, groups, strict=True)):
        return found
    sources = find_flag_sources(words)
    return [
        None if is_setting(group) and sources.has_group(read_key(group[0])) else each
        for each, group in zip(found, groups, strict=True)
    ]


def correct_tail(command: Command, stray: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the program's part of the corrected command line: a stray word begins a program."""
    if stray:
        before = ["--", *stray] if takes_program(command.verb) else []
    else:
        before = ["train.py"] if options and not command.tail else []
    return [*before, *command.tail, *options]


def is_stray(group: Sequence[str]) -> bool:
    """Tell whether a word is no option, no setting and no program."""
    word = group[0]
    return word != "" and "=" not in word and not word.startswith(("-", "~"))


def is_setting(group: Sequence[str]) -> bool:
    """Tell whether a word is KEY=VALUE."""
    return not group[0].startswith("-")


def describe_stray(command: Command, word: str) -> str:
    """Say what is wrong with a word that is no option, no setting and no program."""
    if not takes_program(command.verb):
        return f"{word!r} is not KEY=VALUE, and `launch {command.verb}` takes nothing else"
    return f"{word!r} is not KEY=VALUE, and no file here: to run it as a program, put `--` before it"


def render_corrected(
    command: Command, corrections: Sequence[Correction], words: Sequence[str], tail: Sequence[str]
) -> str:
    """Return the command line with other words, for a shell."""
    verb = [] if command.verb == "run" else [command.verb]
    before = "".join(f"{each.environ} " for each in corrections if each.environ)
    argv = mask_words(["launch", *verb, *command.names, *words, *tail])
    return f"`{before}{join_words(argv)}`"


def correct_group(group: Sequence[str]) -> Correction | None:
    """Return what is to be written instead of an option or a setting that is not ours, else None."""
    if not group[0].startswith("-"):
        key, value = read_key(group[0]), group[0].partition("=")[2]
        return correct_key(key, value, group[0])
    option, _, value = group[0].partition("=")
    if takes_flag_value(option, "") is not None or group[0] == "-":
        return None
    if len(group) == 2:
        value = group[1]
    return correct_option(option, value, tuple(group))


def correct_key(key: str, value: str, word: str) -> Correction | None:
    """Return what is wrong with a setting that another tool has."""
    if key == "devices" and GPU_NAMES.fullmatch(value):
        return correct_devices(value, word)
    if key in OWN_KEYS:
        return None
    foreign = find_foreign(key, value)
    return Correction(foreign.explain(word, value), tuple(foreign.translate(value))) if foreign else None


def correct_devices(value: str, word: str) -> Correction:
    """Return how GPUs are chosen, which `devices` does not do."""
    problem = (
        f"{word} names GPUs, and devices takes all, own or spread (which of the job's GPUs a rank sees): "
        f"write {VISIBLE}={value}, or set the variable before launch"
    )
    return Correction(problem, environ=f"CUDA_VISIBLE_DEVICES={value}")


def correct_option(option: str, value: str, group: tuple[str, ...]) -> Correction:
    """Return what to write instead of an option that is not ours; raises UsageError for one nearly ours."""
    shown, name = " ".join(group), option.lstrip("-").replace("-", "_")
    if name == "devices" and GPU_NAMES.fullmatch(value):
        return correct_devices(value, shown)
    if foreign := find_option(option, value):
        return Correction(foreign.explain(shown, value), tuple(foreign.translate(value)))
    if name.partition(".")[0] in OWN_KEYS:
        field = OWN_KEYS.get(name)
        setting = f"{name}={value or ('true' if field and field.type is bool else '…')}"
        return Correction(
            f"{shown} is a setting, and these are written KEY=VALUE: write {setting}", (setting,)
        )
    near = difflib.get_close_matches(option, make_parser()._option_string_actions, n=1, cutoff=0.7)
    if near:
        raise UsageError(f"there is no option {option}: did you mean {near[0]}?")
    return Correction(
        f"there is no option {option}, and a program's options stand after the program", (), group
    )
