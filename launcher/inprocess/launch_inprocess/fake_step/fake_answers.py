"""What a program gets that asks for the value of a fake tensor, and when that ends the session instead.

A number that is logged or divided by can be any number. One that decides a shape, or the way through a
module's forward, cannot: then nobody can tell what memory the step would take.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .step_session import StepSession

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARIES = tuple(
    os.path.abspath(path) + os.sep
    for path in {sysconfig.get_paths()["stdlib"], os.path.dirname(os.path.dirname(HERE))}
)
MOST_LINE = 200
"""Characters of a source line."""
TRUE_NAMES = ("isfinite", "all_finite", "is_finite")


def answer_scalar(session: StepSession, tensor: torch.Tensor) -> bool | int | float:
    """Return a plausible value: 1 for a number, False for a truth value; a session notes what it is for.

    Within a module's forward, a whole number or a truth value decides shapes or the way: that ends the
    session. Two known questions have their answers: gradients are finite, and none is infinite.
    """
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        is_overflow = is_called_by("grad_scaler.py")
        if not is_overflow:
            session.note_answer("a number", 1.0)
        return 0.0 if is_overflow else 1.0
    if session.is_in_forward():
        what = "a truth value" if tensor.dtype == torch.bool else "a whole number"
        session.refuse(f"the program's way depends on {what} of a tensor", "aten::_local_scalar_dense")
    if tensor.dtype == torch.bool:
        answer = is_asked_finite()
        session.note_answer("a truth value", answer)
        return answer
    session.note_answer("a whole number", 1)
    return 1


def is_called_by(file: str) -> bool:
    """Tell whether a file of torch's asks, within a few frames."""
    frame = sys._getframe(2)
    for _ in range(30):
        if frame.f_code.co_filename.endswith(file):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def is_asked_finite() -> bool:
    """Tell whether the program's line asks for values being finite, which they are."""
    return any(name in find_user_line()[2] for name in TRUE_NAMES)


def name_operator(func: Any) -> str:  # an operator
    """Return the name of an operator as torch writes it."""
    return str(getattr(func, "_schema", func)).partition("(")[0]


def find_user_line() -> tuple[str, int, str]:
    """Return file, number and text of the innermost line of the user's, by the frames on the stack."""
    import linecache

    frame: Any = sys._getframe(1)
    found = "", 0
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not is_library_file(file):
            found = file, line
            break
        frame = frame.f_back
    return found[0], found[1], linecache.getline(*found).strip()[:MOST_LINE] if found[0] else ""


def find_traced_line(trace: Any) -> tuple[str, int, str]:
    """Return file, number and text of the innermost line of the user's in a traceback."""
    import linecache

    found = "", 0
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not is_library_file(file):
            found = file, trace.tb_lineno
        trace = trace.tb_next
    return found[0], found[1], linecache.getline(*found).strip()[:MOST_LINE] if found[0] else ""


def is_library_file(file: str) -> bool:
    """Tell whether a file is Python's, a package's, or this hook's."""
    return file.startswith(("<", *LIBRARIES)) or f"{os.sep}site-packages{os.sep}" in file or HERE in file
