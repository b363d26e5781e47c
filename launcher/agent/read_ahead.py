"""Starts the process that reads ahead, where a start would wait for a disk, and ends it with the launcher."""

import contextlib
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.agent.page_cache import are_cached
from launcher.agent.read_order import name_record, pick_samples
from launcher.agent.torch_use import is_without_torch
from launcher.config.cache_folder import name_cache_folder, open_cache_folder
from launcher.files import make_inner, read_file
from launcher.protocol import LAUNCH_READ_ORDER
from launcher.runs.run_directory import write_json

PROGRAM = Path(__file__).with_name("read_ahead_program.py")
FOLDER = "read-order"
"""Of the records, in the folder for what launch keeps between runs."""
LARGEST_RECORD = 16 << 20
"""Bytes of a record; that of torch has 100 KB."""
LARGEST_ACCOUNT = 1 << 16
"""Bytes of what the process tells."""
PYTHON = re.compile(r"(python|pypy)[0-9.]*")
MAX_AGE = 7 * 86400.0
"""Seconds after which a record is made anew: packages change."""
MAX_RECORDS = 64
"""Records that are kept, for as many programs."""


@dataclass(slots=True)
class ReadAhead:
    """The process that reads ahead, if there is need for one."""

    process: "subprocess.Popen[bytes] | None" = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """For the ranks: where rank 0 is to record what it has read."""
    account_path: Path | None = None
    """Where to keep what the process tells."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The process, which is no rank's."""
        return (self.process.pid,) if self.process else ()

    def use_directory(self, run_path: Path, host: str) -> None:
        """Have what the process tells kept in a run directory."""
        self.account_path = run_path / f"read-ahead-{host}.json"

    def close(self) -> None:
        """End the process if it still reads, and keep what it told."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(OSError, ValueError):
            told, _ = process.communicate()
            account = json.loads(told[:LARGEST_ACCOUNT])
            if self.account_path:
                write_json(self.account_path, account)


@contextlib.contextmanager
def reading_ahead(
    mode: str, argv: tuple[str, ...], environ: Mapping[str, str], early: ReadAhead | None = None
) -> Iterator[ReadAhead]:
    """Have a program's files read ahead while this lasts, if need be; see `start_read_ahead`.

    `early` was started for the same program already. A Python program without torch reads little:
    then `auto` starts nothing.
    """
    if mode == "auto" and not early and is_without_torch(argv, environ):
        mode = "off"
    directory = os.getcwd()  # noqa: PTH109 - as the program has it
    python = find_program_python(argv, environ)
    reader = early or start_read_ahead(mode, python, argv, environ, directory)
    try:
        yield reader
    finally:
        reader.close()


def start_read_ahead(
    mode: str, python: str, argv: tuple[str, ...], environ: Mapping[str, str], directory: str
) -> ReadAhead:
    """Have what a program is about to read brought into the page cache, if it is not there; returns at once.

    `mode` is `start.read_ahead`, `python` the ranks' interpreter, `argv` the program's argv, and `directory`
    where it runs. What fails here ends no start: then nothing is read ahead.
    """
    if mode == "off":
        return ReadAhead()
    try:
        return open_read_ahead(mode, python, argv, environ, directory)
    except OSError:
        return ReadAhead()


def open_read_ahead(
    mode: str, python: str, argv: tuple[str, ...], environ: Mapping[str, str], directory: str
) -> ReadAhead:
    """Look for the program's record, and start the process unless all of it is cached; raises OSError."""
    path = environ.get("PYTHONPATH", "")
    name, beginning = name_record(python, path, argv, directory)
    folder = find_record_folder(environ)
    names = list_records(folder)
    record = os.path.join(folder, name)  # noqa: PTH118 - text for the process and for the ranks
    is_fresh = name in names and time.time() - names[name] < MAX_AGE
    variables = {} if is_fresh else {LAUNCH_READ_ORDER: record}
    if name not in names:
        alike = max((other for other in names if other.startswith(beginning)), key=names.get, default="")  # type: ignore[arg-type]
        record = os.path.join(folder, alike) if alike else ""  # noqa: PTH118 - as above
    if mode == "auto" and record and is_record_cached(record):
        return ReadAhead(None, variables)
    folders = list_package_folders(python, path)
    request = {"record": record, "folders": folders, "always": mode == "on"}
    return ReadAhead(start_process(request), variables)


def start_process(request: Mapping[str, object]) -> "subprocess.Popen[bytes]":
    """Start the process; it ends when the pipe to it is closed. Raises OSError."""
    return subprocess.Popen(
        (sys.executable, "-I", "-S", str(PROGRAM), json.dumps(request)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the launcher
    )


def is_record_cached(record: str) -> bool:
    """Tell whether what a record names seems to be in the page cache; false if the kernel does not tell."""
    try:
        samples = pick_samples(json.loads(read_file(record, LARGEST_RECORD, own=True)))
    except (OSError, ValueError, RecursionError):
        return False
    return are_cached(samples) is True


def find_record_folder(environ: Mapping[str, str]) -> str:
    """Return the folder of the records, made for this user alone; raises OSError if there can be none."""
    cache = open_cache_folder(environ)
    try:
        os.close(make_inner(cache, FOLDER))
    finally:
        os.close(cache)
    return str(name_cache_folder(environ) / FOLDER)


def list_records(folder: str) -> dict[str, float]:
    """Return the records' names with the times when they were made; the oldest of too many are removed."""
    with os.scandir(folder) as entries:
        found = {entry.name: entry.stat(follow_symlinks=False).st_mtime for entry in entries}
    for name in sorted(found, key=found.__getitem__)[: max(0, len(found) - MAX_RECORDS)]:
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{name}")  # noqa: PTH108
        del found[name]
    return {name: made for name, made in found.items() if name.endswith(".json")}


def find_program_python(argv: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """Return the path of the interpreter that a program runs in, as far as its argv tells, else this one.

    Links stay: a virtual environment's interpreter is one.
    """
    first = argv[0] if argv else ""
    if first == "-m" or first.endswith(".py"):
        first = environ.get("PYTHON_EXEC", "")
    elif not PYTHON.fullmatch(os.path.basename(first)):  # noqa: PTH119
        first = ""
    return (shutil.which(first, path=environ.get("PATH")) or sys.executable) if first else sys.executable


def list_package_folders(python: str, path: str) -> list[str]:
    """Return where an interpreter's packages are by custom: PYTHONPATH's folders and its `site-packages`."""
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(python)))  # noqa: PTH100, PTH120 - links stay
    found = glob.glob(f"{glob.escape(prefix)}/lib/python3*/*-packages")  # noqa: PTH207
    return [*(folder for folder in path.split(os.pathsep) if folder.startswith("/")), *sorted(found)]
