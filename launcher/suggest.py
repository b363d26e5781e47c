"""Errors of Hydra, OmegaConf and YAML in one line, with the nearest right name."""

import difflib
from collections.abc import Sequence


def suggest(word: str, known: Sequence[str]) -> str:
    """Return `: did you mean …?`, else the choices where they are few."""
    near = difflib.get_close_matches(word, dict.fromkeys(known), n=2, cutoff=0.5)
    if near:
        return f": did you mean {' or '.join(near)}?"
    return f": choose from {', '.join(sorted(known))}" if 0 < len(known) < 20 else ": see `launch --help`"


def shorten_message(error: BaseException) -> str:
    """Return an error as one line, with the key where it is known."""
    cause = error.__cause__ if str(error.__cause__ or "") else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = next((line.partition(":")[2].strip() for line in lines if line.startswith("full_key:")), "")
    text = " ".join(
        line for line in lines if not line.startswith(("full_key", "object_type", "reference_type"))
    )
    return f"{key}: {text}" if key else text or type(error).__name__
