"""Shell completion: what the shell evaluates to switch it on, and the answers to its questions."""

import os
import re
import shlex
import sys
from collections.abc import Sequence

from launcher.cli.arguments import OF_RUNS, SUBJECTS
from launcher.config.hydra_flags import make_parser, parse_flags
from launcher.config.search_path import Sources
from launcher.errors import UsageError

PLAIN = re.compile(r"[\w@%+=:,./~\[\]{}-]+")
"""Answers that a shell takes as they are; bash would expand `$(…)` in a value of somebody's conf/."""


def complete_line(sources: Sources, request: Sequence[str], verbs: Sequence[str]) -> int:
    """Switch completion on (`install=bash`, `zsh`, `fish`) or off, or answer a shell's `query=`.

    Raises UsageError for another request. A line that makes no sense yet has no answers, and no error.
    """
    asked = [word.partition("=")[0] for word in request]
    if asked not in (["install"], ["uninstall"], ["query"]):
        raise UsageError('say which shell: eval "$(launch -sc install=bash)", or `launch -sc install=fish`')
    if asked != ["query"]:
        from launcher.config.hydra_output import ask_completion

        sys.stdout.write(ask_completion(sources, request[0]))
        return 0
    # A newline is what fish asks for, and bash and zsh split at it too.
    for answer in answer_query(request[0], os.environ.get("COMP_LINE", ""), verbs):
        sys.stdout.write(f"{answer}\n")
    return 0


def answer_query(request: str, line: str, verbs: Sequence[str]) -> list[str]:
    """Return the words that may stand where the line ends; nothing after `--`."""
    words = split_line(line)[1:] or [""]
    if "--" in words[:-1] or len(words[-1].split()) > 1:
        return []
    *before, last = words
    flags = sorted(name for name in make_parser()._option_string_actions if name.startswith(last))
    if before and before[0] in OF_RUNS:
        from launcher.cli.run_completion import complete_names

        found = [word for word in complete_names(before[0], before[1:], last) if PLAIN.fullmatch(word)]
        return found + flags if last.startswith("-") else found
    if last.startswith("-"):
        return flags
    answers = [verb for verb in verbs if verb.startswith(last)] if not before else []
    if before == ["tune"]:
        return [subject for subject in SUBJECTS if subject.startswith(last)]
    if before and before[0] in verbs:
        del before[: 2 if before[0] == "tune" else 1]
    from launcher.config.hydra_output import ask_completion

    try:
        known = parse_flags(before)
        found = ask_completion(known.sources, request, [*known.overrides, last]).split()
    except UsageError:
        return answers
    return answers + [answer for answer in found if PLAIN.fullmatch(answer)]


def split_line(line: str) -> list[str]:
    """Split a command line as the shell will, the unfinished last word kept, also within quotes."""
    for closing in ("", "'", '"'):
        try:
            words = shlex.split(line + closing)
        except ValueError:
            continue
        return [*words, ""] if line[-1:].isspace() and not closing else words
    return line.split(" ")
