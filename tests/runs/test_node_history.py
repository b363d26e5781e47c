"""Nodes over past runs: counts, order, and manifests with anything in them."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from launcher.runs.node_history import MOST_EVENTS, collect_history

START = "2026-11-22T12:00:00.000+00:00"
SICK = {"host": "n2", "level": "error", "subject": "limits", "what": "/dev/shm has 8 MiB", "fix": ""}
SLOW = {"host": "n1", "rank": 3, "detail": "its core is shared"}
HANG = {"number": 1, "verdict": {"sentence": "rank 1 on n1 has not joined", "hosts": ["n1"]}}


def make_manifest(**parts: Any) -> dict[str, Any]:
    return {"started": START, "hosts": ["n0", "n1", "n2"], "outcome": {}, "earlier": [], **parts}


def test_what_befell_each_node_is_counted_once_for_an_attempt() -> None:
    first = make_manifest(preflight={"findings": [SICK, SICK], "sick": ["n2"]}, hosts=["n0", "n1"])
    second = make_manifest(
        outcome={"lost": ["n2"]}, hangs=[HANG, HANG], stragglers=[SLOW, SLOW, SLOW], earlier=[first]
    )
    third = make_manifest(preflight={"findings": [{**SICK, "level": "warning"}], "sick": []})
    nodes = {node.host: node for node in collect_history([("a/1", second), ("b/1", third)])}
    assert [*nodes] == ["n2", "n1", "n0"]
    n2, n1 = nodes["n2"], nodes["n1"]
    assert (n2.runs, n2.sick, n2.lost, n2.warning, n2.trouble) == (2, 1, 1, 1, 2)
    assert (n1.runs, n1.hang, n1.slow, n1.trouble) == (2, 1, 1, 2)
    assert {(event.kind, event.run) for event in n2.events} == {
        *(("sick", "a/1"), ("lost", "a/1"), ("warning", "b/1"))
    }
    assert (nodes["n0"].runs, nodes["n0"].trouble, nodes["n0"].events) == (2, 0, ())


def test_a_silent_node_without_a_finding_is_sick() -> None:
    (node, *_) = collect_history([("a/1", make_manifest(preflight={"sick": ["n7"]}))])
    assert (node.host, node.sick, node.events[0].text) == ("n7", 1, "preflight found it sick")


def test_the_newest_events_are_kept() -> None:
    runs = [
        (f"a/{hour}", make_manifest(outcome={"lost": ["n0"]}, started=START.replace("12:", f"{hour:02}:")))
        for hour in range(24)
    ]
    (node, *_) = collect_history(runs)
    assert node.lost == 24 and len(node.events) == MOST_EVENTS
    assert [event.run for event in node.events][:2] == ["a/23", "a/22"] and node.last_run == "a/23"


def test_names_that_are_no_hosts_are_left_out() -> None:
    strange = ["n0", "\x1b[31mn1", "", "-x", "a b", 7, None, "x" * 300, "../n"]
    found = collect_history([("a/1", make_manifest(hosts=strange, outcome={"lost": strange}))])
    assert [node.host for node in found] == ["n0"]


KEYS = (
    "preflight outcome hosts findings sick lost hangs verdict stragglers earlier started host level sentence"
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(manifest=st.dictionaries(st.sampled_from(("preflight", "outcome", "hosts", "hangs")), ANYTHING))
def test_any_manifest_is_read(manifest: dict[str, Any]) -> None:
    json.dumps([node.host for node in collect_history([("a/1", manifest)])])
