"""What the doctor says of a machine that has nothing to mend, and of one that it cannot see."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from launcher.doctor.finding import LEVELS, Finding
from launcher.report.runs import print_findings
from tests.doctor.healthy_tree import pick, run_doctor
from tests.seam import run_inside

SUBJECTS = {
    "placement",
    "CPUs",
    "memory",
    "GPUs",
    "limits",
    "clocks",
    "interrupts",
    "environment",
    "last run",
}


@pytest.mark.usefixtures("here")
def test_a_healthy_machine_passes(healthy: Path) -> None:
    done, findings = run_doctor(healthy)
    assert done.code == 0
    assert not pick(findings, "error", "warning", "note")
    assert {finding["subject"] for finding in findings} == SUBJECTS
    assert all(set(finding) == {"level", "subject", "what", "why", "fix"} for finding in findings)
    said = [finding["what"] for finding in pick(findings, "ok")]
    assert "all 64 CPUs on 2 NUMA nodes, whole cores, with memory" in said
    assert "32 cores for 4 ranks and 8 DataLoader workers, 14 wanted" in said
    assert "PCI links of 6 GPUs and NICs at full width" in said
    assert "6 GPUs and NICs are served next to them; irqbalance runs" in said
    assert "performance (acpi-cpufreq) on CPUs 0-63" in said
    assert "4 of 4 used: NVIDIA A100-SXM4-40GB" in said
    memory = [finding["what"] for finding in findings if finding["subject"] == "memory"]
    assert memory[0].startswith("1 TiB of main memory")


@pytest.mark.usefixtures("here")
def test_what_another_machines_files_cannot_tell_is_said(healthy: Path) -> None:
    _, findings = run_doctor(healthy)
    unknown = {finding["what"] for finding in pick(findings, "unknown")}
    reason = "not checked: not in these files"
    assert f"permission to bind {reason}" in unknown
    assert f"variables {reason}" in unknown
    assert f"persistence mode {reason}" in unknown
    assert "not compared: it is about this machine; run_dir=DIR compares a run" in unknown


@pytest.mark.usefixtures("here")
def test_a_healthy_machine_fits_a_screen(healthy: Path) -> None:
    _, findings = run_doctor(healthy)
    shown = show([Finding(**finding) for finding in findings])
    assert len(shown) <= 25, "\n".join(shown)
    assert shown[-1] == f"nothing to mend; {len(pick(findings, 'ok'))} checks passed, " + (
        f"{len(pick(findings, 'unknown'))} could not be made"
    )


def show(findings: list[Finding], encoding: str = "utf-8") -> list[str]:
    raw = io.TextIOWrapper(inner := io.BytesIO(), encoding=encoding)
    print_findings(Console(file=raw, width=80, highlight=False), findings)
    raw.flush()
    return inner.getvalue().decode(encoding).splitlines()


BAD = Finding("error", "limits", "b [red]\x1b[31m\n", "because", "do this")
GOOD = Finding("ok", "CPUs", "a")


def test_problems_come_first_with_reason_and_fix() -> None:
    shown = [line.rstrip() for line in show([GOOD, BAD])]
    assert shown == [
        r"✗ limits b [red]\x1b[31m\n",
        "         why: because",
        "         fix: do this",
        "✓ CPUs   a",
        "1 error; 1 check passed",
    ]


def test_marks_fit_the_encoding() -> None:
    findings = [Finding(level, level, "x") for level in LEVELS]
    assert [line[0] for line in show(findings, "ascii")[:-1]] == ["x", "!", "i", "?", "+"]


def test_a_subject_stays_together_after_its_worst_finding() -> None:
    note = Finding("note", "CPUs", "n", "w", "f")
    shown = show([GOOD, Finding("warning", "GPUs", "g", "w", "f"), note])
    assert [line[0] for line in shown if line[0] != " "] == ["!", "i", "✓", "1"]


@pytest.mark.usefixtures("here")
def test_a_snapshot_is_judged_as_far_as_it_goes(healthy: Path, tmp_path: Path) -> None:
    plan = run_inside(["plan", f"machine.root={healthy}", "format=json"])
    (tmp_path / "plan.json").write_text(plan.out)
    done = run_inside(["doctor", f"machine.snapshot={tmp_path / 'plan.json'}", "format=json"])
    findings = json.loads(done.out)["findings"]
    assert done.code == 0
    assert not pick(findings, "error", "warning", "note")
    assert {finding["subject"] for finding in findings} == SUBJECTS
    unknown = " ".join(finding["what"] for finding in pick(findings, "unknown"))
    assert "open files not checked" in unknown
    assert "frequency not checked" in unknown
    assert "PCI link width not checked" in unknown
    assert "interrupts of GPUs and NICs not checked" in unknown


@pytest.mark.usefixtures("here")
def test_a_table_is_the_default(healthy: Path) -> None:
    done = run_inside(["doctor", f"machine.root={healthy}"])
    assert done.code == 0
    assert done.out.splitlines()[-1].startswith("nothing to mend; ")
    assert done.err == ""
