"""The doctor on this very machine: the shim's trial, the limits of the process, a real run."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.healthy_tree import pick
from tests.rank.seccomp_filter import KNOWN, forbid
from tests.seam import Result, run_outside, start, write_program

RANKS = min(2, len(os.sched_getaffinity(0)))


def run_here(folder: Path, *words: str, **options: Any) -> tuple[Result, list[dict[str, str]]]:
    """Run `launch doctor format=json` as a command in a folder."""
    done = run_outside(["doctor", f"nproc_per_node={RANKS}", "format=json", *words], folder, **options)
    assert done.err == "", done.err
    findings: list[dict[str, str]] = json.loads(done.out)["findings"]
    assert done.code == int(bool(pick(findings, "error", "warning")))
    return done, findings


def find(findings: list[dict[str, str]], part: str) -> dict[str, str]:
    """The one finding that has a part in it."""
    hits = [finding for finding in findings if part in finding["what"]]
    assert len(hits) == 1, findings
    return hits[0]


def test_the_shim_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    _, findings = run_here(tmp_path, env={"TMPDIR": str(scratch)})
    assert find(findings, "taken as planned")["level"] == "ok"
    assert list(scratch.iterdir()) == []
    assert find(findings, "no run below runs_dir=runs yet")["level"] == "unknown"


@pytest.mark.skipif(not KNOWN, reason="the filter knows x86_64 and aarch64 alone")
def test_a_container_that_forbids_memory_policies_is_found(tmp_path: Path) -> None:
    _, findings = run_here(tmp_path, preexec_fn=lambda: forbid("set_mempolicy"))
    refused = find(findings, "Operation not permitted")
    assert (refused["level"], refused["subject"]) == ("warning", "placement")
    assert "SYS_NICE" in refused["fix"]


def test_the_limits_of_this_process_are_read(tmp_path: Path) -> None:
    _, findings = run_here(
        tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, 768))
    )
    assert find(findings, "may open 768 files")["level"] == "warning"


def test_the_environment_is_read_with_the_configured_one(tmp_path: Path) -> None:
    _, findings = run_here(tmp_path, "env.CUDA_LAUNCH_BLOCKING=1", env={"OMP_PLACES": "cores"})
    assert find(findings, "CUDA_LAUNCH_BLOCKING=1 is set")["level"] == "warning"
    assert find(findings, "OMP_PLACES=cores is set")["level"] == "warning"


@pytest.mark.usefixtures("quick_agent")
def test_a_real_run_is_as_planned_until_it_is_tampered_with(tmp_path: Path) -> None:
    with start(tmp_path, f"nproc_per_node={RANKS}", "--", write_program(tmp_path, "pass")) as started:
        assert started.wait(120) == 0, started.read()
        run = started.run_dir()
    _, findings = run_here(tmp_path)
    name = run.relative_to(tmp_path)
    passed = find(findings, f"{name}, succeeded: applied equals planned on {RANKS} rank")
    assert (passed["level"], passed["subject"]) == ("ok", "last run")

    record = run / "rank-0.applied.json"
    data = json.loads(record.read_text())
    record.write_text(json.dumps({**data, "cpus": "4000"}))
    done, findings = run_here(tmp_path)
    assert done.code == 1
    assert find(findings, f"rank 0 runs on CPUs 4000, planned {data['cpus']}")["level"] == "error"

    (tmp_path / "elsewhere").mkdir()
    _, findings = run_here(tmp_path / "elsewhere", f"run_dir={run}")
    assert find(findings, "rank 0 runs on CPUs 4000")["level"] == "error"
