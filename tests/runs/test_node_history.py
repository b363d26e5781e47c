"""`launch nodes` over past runs: counts, order, and manifests with anything in them."""

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cli.make_runs import make_run
from tests.seam import Launch

START = "2026-11-22T12:00:00.000+00:00"
SICK = {"host": "n2", "level": "error", "subject": "limits", "what": "/dev/shm has 8 MiB", "fix": ""}
SLOW = {"host": "n1", "rank": 3, "detail": "its core is shared"}
HANG = {"number": 1, "verdict": {"sentence": "rank 1 on n1 has not joined", "hosts": ["n1"]}}


def make_manifest(**parts: Any) -> dict[str, Any]:
    return {"started": START, "hosts": ["n0", "n1", "n2"], "outcome": {}, "earlier": [], **parts}


def make(here: Path, name: str, **parts: Any) -> None:
    """Write a run `NAME/1`."""
    path = make_run(here / "runs", name, "1")
    (path / "manifest.json").write_text(json.dumps(make_manifest(**parts)))


def ask(launch: Launch, *words: str) -> list[dict[str, Any]]:
    result = launch("nodes", *words, "format=json")
    assert result.code == 0, result
    nodes: list[dict[str, Any]] = json.loads(result.out)["nodes"]
    return nodes


def test_what_befell_each_node_is_counted_once_for_an_attempt(launch: Launch, here: Path) -> None:
    first = make_manifest(preflight={"findings": [SICK, SICK], "sick": ["n2"]}, hosts=["n0", "n1"])
    make(
        here,
        "a",
        **{"outcome": {"lost": ["n2"]}, "hangs": [HANG, HANG], "stragglers": [SLOW, SLOW, SLOW]},
        earlier=[first],
    )
    make(here, "b", preflight={"findings": [{**SICK, "level": "warning"}], "sick": []})
    keys = ("host", "runs", "sick", "lost", "hang", "slow", "warning", "trouble")
    assert [[node[key] for key in keys] for node in ask(launch)] == [
        ["n2", 2, 1, 1, 0, 0, 1, 2],
        ["n1", 2, 0, 0, 1, 1, 0, 2],
        ["n0", 2, 0, 0, 0, 0, 0, 0],
    ]
    events = {node["host"]: {(one["kind"], one["run"]) for one in node["events"]} for node in ask(launch)}
    assert events["n2"] == {("sick", "a/1"), ("lost", "a/1"), ("warning", "b/1")} and not events["n0"]


def test_a_silent_node_without_a_finding_is_sick(launch: Launch, here: Path) -> None:
    make(here, "a", preflight={"sick": ["n7"]})
    (node,) = ask(launch, "n7")
    assert (node["sick"], [event["kind"] for event in node["events"]]) == (1, ["sick"])


def test_the_newest_events_are_kept(launch: Launch, here: Path) -> None:
    for hour in range(24):
        make(here, f"a{hour:02}", outcome={"lost": ["n0"]}, started=START.replace("12:", f"{hour:02}:"))
    (node,) = ask(launch, "n0")
    assert node["lost"] == 24 and 2 <= len(node["events"]) < 24
    assert [event["run"] for event in node["events"]][:2] == ["a23/1", "a22/1"]
    assert node["last_run"] == "a23/1"


def test_names_that_are_no_hosts_are_left_out(launch: Launch, here: Path) -> None:
    strange = ["n0", "\x1b[31mn1", "", "-x", "a b", 7, None, "x" * 300, "../n"]
    make(here, "a", hosts=strange, outcome={"lost": strange})
    assert [node["host"] for node in ask(launch)] == ["n0"]


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
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_manifest_is_read(launch: Launch, here: Path, manifest: dict[str, Any]) -> None:
    path = here / "runs/a/1"
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text(json.dumps(manifest))
    ask(launch)
