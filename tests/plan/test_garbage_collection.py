"""The policy for garbage collection: its text, and the two readers of it."""

import pytest

from launcher.inprocess.launch_inprocess.garbage_collection import parse_policy
from launcher.plan.model import GC_POLICIES, GcConfig
from launcher.plan.variables import find_gc_fault, render_gc

FAULTS = (
    "",
    "synchronised",
    "synchronized,every=abc",
    "synchronized,every=",
    "synchronized,every=٣",
    "synchronized,every=1000000000",
    "frozen,warmup=-1",
    "disabled,evry=5",
    "disabled,log=1",
    "disabled,",
)


@pytest.mark.parametrize("text", FAULTS)
def test_both_readers_refuse_the_same(text: str) -> None:
    assert find_gc_fault(text)
    with pytest.raises(ValueError, match=r"no policy|option|neither"):
        parse_policy(text)


@pytest.mark.parametrize("name", GC_POLICIES)
@pytest.mark.parametrize("log", [False, True])
def test_what_the_plan_writes_is_read_in_the_rank(name: str, log: bool) -> None:
    text = render_gc(GcConfig(name, 7, 8, log))
    used = GC_POLICIES[name]
    assert find_gc_fault(text) == ""
    expected = (name, 7 if "warmup" in used else 30, 8 if "every" in used else 50, log)
    assert parse_policy(text) == expected
    assert text.count(",") == len(used) + log
