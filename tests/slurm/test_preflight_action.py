"""What becomes of a job whose nodes were checked, as a table; whether they are; requeues for sick nodes."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.config.settings import RequeueConfig
from launcher.slurm import preflight_kind
from launcher.slurm.attempt_end import EndFacts, classify_end
from launcher.slurm.preflight_action import choose_hosts
from launcher.slurm.preflight_kind import choose_preflight_kind
from launcher.slurm.requeue_policy import PastAttempt, decide_requeue
from tests.seam import clean_environ

FOUR = ("n0", "n1", "n2", "n3")


@pytest.mark.parametrize(
    ("sick", "on_failure", "nodes", "owned", "expected"),
    [
        ((), "stop", (4, 4), True, ("start", FOUR)),
        (("n2",), "report", (4, 4), True, ("start", FOUR)),
        (("n2",), "stop", (2, 4), True, ("stop", ())),
        # A sick spare is of no use, and does no harm.
        (("n3",), "stop", (3, 3), True, ("start", ("n0", "n1", "n2"))),
        (("n0",), "exclude", (2, 4), True, ("leave_out", ("n1", "n2", "n3"))),
        (("n1", "n2"), "exclude", (2, 4), False, ("leave_out", ("n0", "n3"))),
        (("n1",), "exclude", (3, 3), True, ("leave_out", ("n0", "n2", "n3"))),
        (("n1", "n3"), "exclude", (3, 3), True, ("requeue", ())),
        (("n2",), "exclude", (4, 4), True, ("requeue", ())),
        (("n2",), "exclude", (4, 4), False, ("stop", ())),
        (FOUR, "exclude", (1, 4), True, ("requeue", ())),
        (("n0", "n1", "n2"), "exclude", (2, 4), True, ("requeue", ())),
    ],
)
def test_the_nodes_that_a_job_goes_on_with(
    sick: tuple[str, ...],
    on_failure: str,
    nodes: tuple[int, int],
    owned: bool,
    expected: tuple[str, tuple[str, ...]],
) -> None:
    choice = choose_hosts(FOUR, sick, on_failure=on_failure, nodes=nodes, owned=owned)
    assert (choice.action, choice.hosts) == expected
    foreseen = {*sick} & {*FOUR[: nodes[1]]}
    assert bool(choice.text) == bool(foreseen)


def test_what_is_done_is_said() -> None:
    spare = choose_hosts(FOUR, ["n1"], on_failure="exclude", nodes=(3, 3), owned=True)
    assert spare.text == "the job goes on n3 in place of n1, on 3 nodes (preflight.on_failure=exclude)"
    fewer = choose_hosts(FOUR, ["n1"], on_failure="exclude", nodes=(2, 4), owned=True)
    assert fewer.text == "the job goes on without n1, on 3 nodes (preflight.on_failure=exclude)"
    foreign = choose_hosts(FOUR, ["n1"], on_failure="exclude", nodes=(4, 4), owned=False)
    assert "not launch's to requeue" in foreign.text


@pytest.mark.parametrize(
    ("kind", "environ", "has_driver", "chosen"),
    [
        ("off", {"SLURM_GPUS_ON_NODE": "8", "SLURMD_NODENAME": "n0"}, True, ""),
        ("light", {}, False, "light"),
        ("deep", {"SLURMD_NODENAME": "n0"}, False, "deep"),
        ("auto", {"SLURM_GPUS_ON_NODE": "8", "SLURMD_NODENAME": "n0"}, True, "light"),
        # What SLURM counts as GPUs may be something else.
        ("auto", {"SLURM_GPUS_ON_NODE": "8", "SLURMD_NODENAME": "n0"}, False, ""),
        # From a login node, which has no GPUs itself.
        ("auto", {"SLURM_GPUS_PER_NODE": "h100:8"}, False, "light"),
        ("auto", {"SLURMD_NODENAME": "n0"}, True, ""),
        ("auto", {"SLURM_GPUS_ON_NODE": "0", "SLURMD_NODENAME": "n0"}, True, ""),
        ("auto", {}, True, ""),
    ],
)
def test_whether_nodes_are_checked(
    kind: str, environ: Mapping[str, str], has_driver: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_kind, "DRIVER_FILES", ("/",) if has_driver else ())
    monkeypatch.setattr(preflight_kind, "PCI_DEVICES", Path("/none"))
    assert choose_preflight_kind(kind, environ) == chosen


@pytest.mark.parametrize(
    ("vendor", "pci_class", "chosen"),
    [
        ("0x10de", "0x030200", "light"),
        ("0x1002", "0x120000", "light"),
        ("0x10de", "0x068000", ""),
        ("0x8086", "0x030000", ""),
    ],
)
def test_a_gpu_without_its_driver_counts(
    vendor: str, pci_class: str, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "0000:07:00.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{pci_class}\n")
    (tmp_path / "0000:08:00.0").mkdir()
    monkeypatch.setattr(preflight_kind, "DRIVER_FILES", ())
    monkeypatch.setattr(preflight_kind, "PCI_DEVICES", tmp_path)
    environ = {"SLURM_GPUS_ON_NODE": "8", "SLURMD_NODENAME": "n0"}
    assert choose_preflight_kind("auto", environ) == chosen


def test_a_sick_node_is_why_an_attempt_ended_unless_slurm_ends_the_job() -> None:
    assert classify_end(EndFacts(sick=True), "") == "sick_node"
    assert classify_end(EndFacts(sick=True), "cancelled") == "cancelled"
    assert classify_end(EndFacts(sick=True), "requeued") == "requeued"


def test_requeues_for_sick_nodes_are_limited_and_are_no_lack_of_progress() -> None:
    policy, past = RequeueConfig(sick_node=3, no_progress=2), PastAttempt("sick_node", False)
    assert [decide_requeue("sick_node", policy, [past] * count, False).requeue for count in range(5)] == [
        *(True, True, True),
        *(False, False),
    ]
    last = decide_requeue("sick_node", policy, [past] * 3, False)
    assert "cluster.requeue.sick_node=3" in last.reason and last.cause == "sick_node"


def test_without_preflight_nothing_of_it_is_imported() -> None:
    script = "import sys\nfrom launcher.slurm import first_node, step_monitor\nfrom launcher.cli import run\n"
    script += "print([name for name in sys.modules if 'preflight' in name])"
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environ(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['launcher.slurm.preflight_kind']"


@pytest.mark.parametrize(
    ("sick", "on_failure", "expected", "words"),
    [
        (("n0",), "report", ("leave_out", ("n2", "n1")), "spare n2 takes the place of n0"),
        (("n1",), "stop", ("leave_out", ("n0", "n2")), "spare n2 takes the place of n1"),
        (("n1", "n2"), "exclude", ("leave_out", ("n0", "n3")), "spare n3 takes the place of n1"),
        (("n2", "n3"), "stop", ("start", ("n0", "n1")), ""),
        (("n0", "n1", "n2"), "report", ("start", ("n3", "n1")), "the job starts all the same"),
        (("n0", "n1", "n2"), "stop", ("stop", ()), "the job does not start"),
        (("n0", "n1", "n2"), "exclude", ("requeue", ()), "1 node of the 2 that the job needs"),
    ],
)
def test_spares_that_were_asked_for_take_the_place_of_sick_nodes(
    sick: tuple[str, ...], on_failure: str, expected: tuple[str, tuple[str, ...]], words: str
) -> None:
    choice = choose_hosts(FOUR, sick, on_failure=on_failure, nodes=(2, 2), owned=True, reserved=2)
    assert (choice.action, choice.hosts) == expected
    assert words in choice.text and bool(words) == bool(choice.text)
