"""Shell completion: what the shell evaluates to switch it on, and the answers to its questions."""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from launcher.cli.main import VERBS, find_verb, group_words
from launcher.config.settings import Settings, refuse
from launcher.config.words import list_flags, parse_flags
from launcher.errors import UsageError
from launcher.runs.run_status import list_runs, name_run

SHELLS = Path(__file__).with_name("shells")
"""What each shell evaluates, `install.bash`. If there are no answers, as for a program's arguments, it offers
files."""
SCRIPTS = [f"{what}={shell}" for what in ("install", "uninstall") for shell in ("bash", "zsh", "fish")]
QUERIES = ("query=bash", "query=zsh", "query=fish")
PLAIN = re.compile(r"[\w@%+=:,./~\[\]{}-]+")
"""Answers that a shell takes as they are; bash would expand `$(…)` in a value of somebody's conf/."""
MOST_RUNS = 100
"""Newest runs that are offered: a shell waits for the answer."""


def complete_line(request: Sequence[str]) -> int:
    """Print what switches completion on (`install=bash`, `zsh`, `fish`) or off, or answer a `query=`.

    Raises UsageError for another request. A line that makes no sense yet has no answers, and no error.
    """
    (asked,) = request if len(request) == 1 else ("",)
    if asked in SCRIPTS:
        sys.stdout.write((SHELLS / asked.replace("=", ".")).read_text(encoding="utf-8"))
    elif asked in QUERIES:
        for answer in answer_query(os.environ.get("COMP_LINE", "")):
            sys.stdout.write(f"{answer}\n")
    else:
        raise refuse("which_shell")
    return 0


def answer_query(line: str) -> list[str]:
    """Return the words that may stand where the line ends; none in a program's arguments."""
    *before, last = split_line(line)[1:] or [""]
    if len(last.split()) > 1:
        return []
    verb, after = (before[0], before[1:]) if before and before[0] in VERBS else ("run", before)
    subjects = find_verb(verb).subjects
    if find_verb(verb).takes_names:
        answers = complete_names(verb, after, last)
    elif subjects and not after:
        answers = [subject for subject in subjects if subject.startswith(last)]
    else:
        answers = [] if before else [verb for verb in VERBS if verb.startswith(last)]
        answers += complete_word(after[bool(subjects) :], last)
    return [answer for answer in answers if PLAIN.fullmatch(answer)]


def complete_word(before: Sequence[str], last: str) -> list[str]:
    """Return the settings, flags and scripts that a word may become, after others of a run or a plan."""
    if sum(map(len, group_words(before))) < len(before):  # a program begins before the last word
        return []
    flag = list_flags().get(before[-1]) if before else None
    if flag and (flag.nargs is None or (flag.nargs == "?" and flag.choices)):
        return [value for value in flag.choices or () if value.startswith(last)]
    if last.startswith("-"):
        return sorted(name for name in list_flags() if name.startswith(last))
    from launcher.config.compose import ask_completion

    try:
        known = parse_flags(before)
        found = ask_completion(known.sources, "query=bash", [*known.overrides, last]).split()
    except UsageError:
        found = []
    return [*found, *list_scripts(last)]


def split_line(line: str) -> list[str]:
    """Split a command line as the shell will, the unfinished last word kept, also within quotes."""
    for closing in ("", "'", '"'):
        with contextlib.suppress(ValueError):
            words = shlex.split(line + closing)
            return [*words, ""] if line[-1:].isspace() and not closing else words
    return line.split(" ")


def list_scripts(last: str) -> list[str]:
    """Return the scripts, and the folders that may hold some, whose path begins so."""
    folder, slash, name = last.rpartition("/")
    if "=" in last or last.startswith("~"):
        return []
    try:
        found = sorted(Path(folder or ("/" if slash else ".")).iterdir())
    except OSError:
        return []
    shown = [path for path in found if path.name.startswith(name) and (name or path.name[0] != ".")]
    paths = [f"{folder}{slash}{path.name}{'/' if path.is_dir() else ''}" for path in shown]
    return [path for path in paths if path.endswith(("/", ".py"))]


def complete_names(verb: str, before: Sequence[str], last: str) -> list[str]:
    """Return what may follow a verb of runs or nodes: keys, then the names of the newest runs, then flags."""
    if "--" in before:
        return []
    given = {word.partition("=")[0]: word.partition("=")[2] for word in before if "=" in word}
    flags = sorted(name for name in list_flags() if last.startswith("-") and name.startswith(last))
    runs_dir = Path(given.get("runs_dir") or Settings.runs_dir)
    runs = islice(list_runs(runs_dir), MOST_RUNS) if VERBS[verb].takes == "runs" else ()
    keys = [key for key in VERBS[verb].keys if key.partition("=")[0] not in (*given, *before)]
    words = [*keys, *map(name_run, runs)]
    return [word for word in words if word.startswith(last) and word not in before] + flags
