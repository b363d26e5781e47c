"""Finds out whether the program's Python would start the hook."""

import os

from launcher.rank.program_kind import locate

DEAF = {"E": "ignores PYTHONPATH", "I": "ignores PYTHONPATH", "S": "runs no sitecustomize"}
"""Options of python(1) with which nothing of ours starts in the interpreter."""
VALUED = "cmWX"
"""Options that a value follows, in the same word or in the next; `-c` and `-m` are the last ones."""
FEW = 4
"""How many words may lead to one another: a script's #! line, env, an interpreter."""
OLDEST = 9
"""Minor version of the oldest Python 3 that the hook runs in: torch 2.6 needs it, too."""
SHEBANG = 256
"""Bytes of a #! line at most (BINPRM_BUF_SIZE of the kernel)."""


def find_deafness(words: list[str], environ: dict[str, str]) -> str:
    """Say in a few words what of a command line keeps the hook from starting; empty where nothing does."""
    for _ in range(FEW):
        name = words[0].rpartition("/")[2] if words else ""
        if name.startswith(("python", "pypy")):
            return judge_version(words[0], environ) or judge_options(name, words[1:])
        if name == "env":
            words, lost = strip_env(words[1:])
            if lost:
                return lost
        else:
            words = read_shebang(words, environ)
    return ""


def judge_version(word: str, environ: dict[str, str]) -> str:
    """Look for a Python that is too old, by the name of the file behind a command word: `python3.6`."""
    name = os.path.realpath(locate(word, environ)).rpartition("/")[2]
    minor = name.removeprefix("python3.")
    is_old = name.startswith("python2") or (minor != name and minor.isdecimal() and int(minor) < OLDEST)
    return f"{name} is older than 3.{OLDEST}" if is_old else ""


def judge_options(name: str, words: list[str]) -> str:
    """Look for options that shut the hook out, as far as the program's own words."""
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word == "--check-hash-based-pycs":
            skip = True
        elif not word.startswith("-") or word in ("-", "--"):
            return ""
        elif not word.startswith("--"):
            letter = next((letter for letter in word[1:] if letter in DEAF or letter in VALUED), "")
            if letter in DEAF:
                return f"{name} -{letter} {DEAF[letter]}"
            if letter and letter in "cm":
                return ""
            skip = word.endswith(letter) if letter else False
    return ""


def strip_env(words: list[str]) -> tuple[list[str], str]:
    """Return what env(1) runs, and what it does to PYTHONPATH, where that shuts the hook out."""
    while words:
        word, rest = words[0], words[1:]
        if word in ("-", "-i", "--ignore-environment"):
            return [], "env drops PYTHONPATH"
        if word.startswith("PYTHONPATH="):
            return [], "env sets another PYTHONPATH"
        if word in ("-u", "-C", "--unset", "--chdir"):
            word, rest = f"{word}={''.join(rest[:1])}", rest[1:]
        if word in ("-u=PYTHONPATH", "--unset=PYTHONPATH", "-uPYTHONPATH"):
            return [], "env drops PYTHONPATH"
        if word.startswith("-S"):
            return [*(word[2:] or " ".join(rest[:1])).split(), *rest[word == "-S" :]], ""
        if "=" not in word and not word.startswith("-"):
            return words, ""
        words = rest
    return [], ""


def read_shebang(words: list[str], environ: dict[str, str]) -> list[str]:
    """Return the command line that a script's #! line makes of its own; empty for what has none."""
    try:
        # A pipe, which exec refuses, is not waited for.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(locate(words[0], environ) if words else "", flags)
        try:
            line = os.read(file, SHEBANG).partition(b"\n")[0]
        finally:
            os.close(file)
    except OSError:
        return []
    # The kernel makes one word of all that follows the interpreter.
    return [*os.fsdecode(line[2:]).split(maxsplit=1), *words] if line.startswith(b"#!") else []
