"""What a command line runs, as torchrun and the shell take it."""

import os
import sys


def add_python(words: list[str]) -> list[str]:
    """Put this interpreter before a Python file that cannot be executed itself, as torchrun does."""
    path = words[0]
    if not path.endswith(".py") or not os.path.isfile(path):
        return words
    with open(path, "rb") as file:
        runs_itself = "/" in path and os.access(path, os.X_OK) and file.read(2) == b"#!"
    return words if runs_itself else [sys.executable or "python3", "-u", *words]


def run_script(path: str, words: list[str], environ: dict[str, str]) -> None:
    """Give a script without a #! line to the shell, as execvp(3) does; returns for what is no text."""
    with open(path, "rb") as file:
        if b"\0" not in file.read(256):
            os.execve("/bin/sh", ["sh", path, *words[1:]], environ)


def locate(word: str, environ: dict[str, str]) -> str:
    """Return the path of a command word, looked up in PATH as exec does; else the word itself."""
    folders = [] if "/" in word else os.get_exec_path(environ)
    paths = (os.path.join(folder, word) for folder in folders)
    return next((path for path in paths if os.access(path, os.X_OK)), word)
