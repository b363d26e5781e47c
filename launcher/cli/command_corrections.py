"""Refuses other tools' options and unknown words, with the name to type instead."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields

from launcher.cli.arguments import Command, group_words
from launcher.cli.verbs import takes_program
from launcher.config.hydra_flags import find_flag_sources, make_parser, takes_flag_value
from launcher.config.overrides import read_key
from launcher.config.settings import Settings
from launcher.errors import UsageError
from launcher.runs.secrets import mask_words

OWN_KEYS = {field.name for field in fields(Settings)}
"""Keys at the top of the configuration."""
GPU_NAMES = re.compile(r"[\d,]+|(?:GPU|MIG)-.*")
"""GPUs as `CUDA_VISIBLE_DEVICES` names them."""


def check_words(command: Command) -> None:
    """Raise UsageError for the words before the program that are neither settings nor flags.

    All names of other tools are told of at once.
    """
    problems: list[str] = []
    for group in group_words(command.words):
        word = group[0]
        if word.startswith("-") and word != "-":
            problems.append(_find_option_problem(group))
        elif "=" in word or word.startswith("~") or not word:
            problems.append(_find_key_problem(word, command.words))
        elif not any(problems):
            problems.append(_describe_stray(command, word))
            break
    if any(problems):
        raise UsageError("; ".join(filter(None, problems)))


def _find_key_problem(word: str, words: Sequence[str]) -> str:
    """Say what another tool's key is here; empty for others, and for a group of the user's of that name."""
    key, value = read_key(word), word.partition("=")[2]
    if key == "devices" and GPU_NAMES.fullmatch(value):
        return (
            f"{word} names GPUs, and devices takes all, own or spread: write env.CUDA_VISIBLE_DEVICES={value}"
        )
    if key in OWN_KEYS:
        return ""
    from launcher.config.mistakes import explain_foreign

    explained = explain_foreign(key)
    if not explained or find_flag_sources(words).has_group(key):
        return ""
    return f"{mask_words([word])[0]} {explained}"


def _find_option_problem(group: Sequence[str]) -> str:
    """Say what to write instead of an option that is not ours, else nothing."""
    from launcher.config.mistakes import explain_option

    option, _, value = group[0].partition("=")
    if takes_flag_value(option, "") is not None:
        return ""
    shown, name = " ".join(mask_words(list(group))), option.lstrip("-").replace("-", "_")
    if explained := explain_option(option):
        return f"{shown} {explained}"
    if name.partition(".")[0] in OWN_KEYS:
        value = group[1] if len(group) == 2 else value
        return f"{shown} is a setting, and these are written KEY=VALUE: write {name}={value or '…'}"
    if near := difflib.get_close_matches(option, make_parser()._option_string_actions, n=1, cutoff=0.7):
        return f"there is no option {option}: did you mean {near[0]}?"
    return f"there is no option {option}: a program's options stand after the program"


def _describe_stray(command: Command, word: str) -> str:
    """Say what is wrong with a word that is no option, no setting and no program."""
    if not takes_program(command.verb):
        return f"{word!r} is not KEY=VALUE, and `launch {command.verb}` takes nothing else"
    return f"{word!r} is not KEY=VALUE, and no file here: to run it as a program, put `--` before it"
