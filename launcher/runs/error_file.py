"""Why a rank's program has failed, as torch's `@record` leaves it in the file TORCHELASTIC_ERROR_FILE."""

import json
from pathlib import Path

from launcher.files import read_file
from launcher.runs.run_directory import RunDir
from launcher.runs.secrets import mask_text
from launcher.text import escape_text

ENDING = "error.json"
"""Of the file's name, which stands beside the rank's logs."""
LARGEST_ERROR = 1 << 20
"""Bytes of such a file at most: a traceback and a little more."""
LONGEST_MESSAGE = 200


def name_error_file(run: RunDir, rank: int, attempt: int) -> Path:
    """Return the path of a rank's file."""
    return run.rank_log(rank, attempt, ENDING)


def read_error(run: RunDir, rank: int, attempt: int) -> str:
    """Return the exception that ended a rank's program, `ValueError: no data`; empty if it left none.

    The file is the program's: it may hold anything. Its form is that of record_exception in
    torch/distributed/elastic/multiprocessing/errors/error_handler.py.
    """
    try:
        data = json.loads(read_file(name_error_file(run, rank, attempt), LARGEST_ERROR, own=True))
    except (OSError, ValueError, RecursionError):
        return ""
    message = data.get("message") if isinstance(data, dict) else None
    text = message.get("message") if isinstance(message, dict) else message
    return escape_text(mask_text(text.strip()), LONGEST_MESSAGE) if isinstance(text, str) else ""
