"""The CUDA allocator: its settings against the table of them."""

import sys
from collections.abc import Iterator

import pytest
import torch

from launcher.plan.variables import KEYS, find_fault
from tests.gpu.proof import PROGRAMS, Proof, together
from tests.plan.test_variables import CORE, LAX, RIGHT, WRONG

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Torch reads the first that is set."""
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
KNOWN = {name: kind for name, (kind, since) in KEYS.items() if since <= VERSION}
"""Settings that this torch knows, with the kinds of their values."""
RUNTIME = ("backend",)
"""Settings that cannot be changed once torch is imported."""


def test_torchs_parser_takes_and_refuses_what_the_table_does(proof: Proof) -> None:
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is None:
        pytest.skip(f"torch {torch.__version__} has no function for it")

    def accepts(text: str) -> bool:
        try:
            set_settings(text)
        except (ValueError, RuntimeError, IndexError):
            return False
        finally:
            set_settings("large_segment_size_mb:20")  # other settings depend on it
        return True

    tried, differ = 0, []
    for name, kind in KNOWN.items():
        if name in RUNTIME or not (torch.version.cuda or name in CORE):
            continue
        for value in filter(str.strip, (*RIGHT[kind], *WRONG[kind])):
            tried += 1
            taken, ours = accepts(f"{name}:{value}"), not find_fault(name, value)
            differ += [(name, value, taken)] * (taken != ours and not (taken and value in LAX))
    proof.record("Allocator", {"what": "values that torch's parser was asked", "number": tried})
    assert tried > 30 and differ == []
    assert not torch.version.cuda or not accepts("no_such_key:1")


def test_cudas_first_use_takes_and_refuses_what_the_table_does(proof: Proof) -> None:
    proof.need_gpu()

    def use(attempt: tuple[str, dict[str, str], bool | None]) -> tuple[str, bool | None, bool, str]:
        name, environ, expected = attempt
        ended = proof.run(name, [sys.executable, PROGRAMS, "first_use"], None, 60, environ)
        return name, expected, ended.code == 0, (ended.err.strip() or ended.out.strip()).splitlines()[-1]

    found = together(use, [*list_settings(), *list_variables()])
    for name, expected, taken, said in found:
        if expected is None or not taken:
            proof.record("Settings at CUDA's first use", {"setting": name, "taken": taken, "torch": said})
    assert [one for one in found if one[1] is not None and one[1] != one[2]] == []


def list_settings() -> Iterator[tuple[str, dict[str, str], bool | None]]:
    """For each setting a right value and a wrong one, and names that this torch does not know."""
    variable = ALLOCATOR_VARIABLES[0]
    for name, kind in KNOWN.items():
        # A share of 0 leaves no memory to use.
        first = RIGHT[kind][-1:] if kind == "share" else RIGHT[kind][:1]
        for value in RIGHT[kind] if name in RUNTIME else first:
            yield f"{name}:{value}", {variable: f"{name}:{value}"}, True
        wrong = next(value for value in WRONG[kind] if value.strip() == value != "" and value not in LAX)
        yield f"{name}:{wrong}", {variable: f"{name}:{wrong}"}, False
    for name in ("no_such_key", *(key for key in KEYS if key not in KNOWN)):
        yield f"{name}, unknown to this torch", {variable: f"{name}:1"}, False


def list_variables() -> Iterator[tuple[str, dict[str, str], bool | None]]:
    """Which variables torch reads: a wrong setting in one that is not read does nothing."""
    first, second, third = ALLOCATOR_VARIABLES[:3]
    wrong, right = "no_such_key:1", "expandable_segments:True"
    both = "expandable_segments:True,max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2,>:8]"
    yield "several together", {first: both, third: both}, True
    yield f"{third} is read", {third: wrong}, VERSION < (2, 10)
    yield f"{first} comes before {third}", {first: right, third: wrong}, True
    yield f"{second} is read", {second: wrong}, None
