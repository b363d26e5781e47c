"""The policy for garbage collection: its text, and the two parsers of it."""

import pytest

from launcher.inprocess.launch_inprocess.garbage_collection import parse_policy
from launcher.plan.gc_policy import GC_POLICIES, GcPolicy, parse_gc_policy, render_gc_policy

TEXTS = {
    "synchronized": GcPolicy(),
    "synchronized,warmup=5,every=9,log": GcPolicy("synchronized", 5, 9, log=True),
    "disabled,every=0": GcPolicy("disabled", every=0),
    "frozen,warmup=3,log": GcPolicy("frozen", 3, log=True),
    "default": GcPolicy("default"),
    "default,log": GcPolicy("default", log=True),
}
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


@pytest.mark.parametrize("text", TEXTS)
def test_both_parsers_read_the_same(text: str) -> None:
    policy = parse_gc_policy(text)
    assert policy == TEXTS[text]
    assert parse_policy(text) == (policy.name, policy.warmup, policy.every, policy.log)


@pytest.mark.parametrize("text", FAULTS)
def test_both_parsers_refuse_the_same(text: str) -> None:
    for parse in (parse_gc_policy, parse_policy):
        with pytest.raises(ValueError, match=r"no policy|option|neither"):
            parse(text)


@pytest.mark.parametrize("name", GC_POLICIES)
@pytest.mark.parametrize("log", [False, True])
def test_a_policy_is_read_back(name: str, log: bool) -> None:
    used = GC_POLICIES[name]
    policy = GcPolicy(name, 7 if "warmup" in used else 30, 8 if "every" in used else 50, log=log)
    assert parse_gc_policy(render_gc_policy(policy)) == policy
