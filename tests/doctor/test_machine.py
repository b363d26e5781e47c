"""What `launch doctor` says of machines: healthy, with faults in their files, not seen, or with garbage."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.codec import convert
from launcher.doctor.machine import Case, judge_machine
from launcher.doctor.model import Facts
from launcher.plan.model import Gpu, Machine, Memory, Plan, RankPlan
from tests.doctor.healthy import HEALTHY, list_edits, pick, read_cases, run_doctor, write_healthy
from tests.probe.machine_trees import GPUS, short_lived, spoilt
from tests.seam import run_inside

CASES = read_cases("machines.toml")["case"]
SUBJECTS = {
    "placement",
    "CPUs",
    "memory",
    "GPUs",
    "limits",
    "clocks",
    "environment",
    "last run",
}
FILES = sorted(path for path in HEALTHY if "/cpu" not in path or "/cpu5/" in path)
"""One CPU's files stand for those of all."""


@pytest.fixture(scope="module")
def healthy() -> Iterator[Path]:
    """The healthy machine's root: it has a thousand files."""
    with short_lived() as folder:
        yield write_healthy(folder / "root")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_found_with_its_values(healthy: Path, name: str) -> None:
    case = CASES[name]
    with spoilt(healthy, list_edits(case)):
        _, findings = run_doctor(f"machine.root={healthy}", *case.get("words", ()))
    told = pick(findings, "error", "warning", "note")
    assert sorted(f"{one['rule']} {one['level']}" for one in told) == sorted(case.get("find", ()))
    for rule, values in case.get("values", {}).items():
        (finding,) = (one for one in told if one["rule"] == rule)
        assert {key: finding["values"][key] for key in values} == values


@pytest.mark.usefixtures("here")
def test_a_healthy_machine_passes_and_fits_a_screen(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, findings = run_doctor(f"machine.root={healthy}")
    assert not pick(findings, "error", "warning", "note")
    assert {finding["subject"] for finding in findings} == SUBJECTS
    keys = {"level", "subject", "what", "why", "fix", "rule", "values"}
    assert all(set(finding) == keys for finding in findings)
    said = {finding["what"] for finding in pick(findings, "ok")}
    assert said >= {
        "all 64 CPUs on 2 NUMA nodes, whole cores, with memory",
        "32 cores for 4 ranks and 8 DataLoader workers, 14 wanted",
        "PCI links of 6 GPUs and NICs at full width",
        "performance (acpi-cpufreq) on CPUs 0-63",
        "4 of 4 used: NVIDIA A100-SXM4-40GB",
    }
    unknown = {finding["what"] for finding in pick(findings, "unknown")}
    reason = "not checked: not in these files"
    assert {f"{what} {reason}" for what in ("permission to bind", "variables", "persistence mode")} <= unknown
    assert "not compared: it is about this machine; run_dir=DIR compares a run" in unknown

    shown = run_inside(["doctor", f"machine.root={healthy}"])
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    counts = [len(pick(findings, level)) for level in ("ok", "unknown")]
    assert lines[-1] == f"nothing to mend; {counts[0]} checks passed, {counts[1]} could not be made"
    assert len(lines) <= 26

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,9")
    _, findings = run_doctor(f"machine.root={healthy}")
    (warning,) = pick(findings, "error", "warning")
    assert "CUDA_VISIBLE_DEVICES" in warning["what"] + warning["fix"]
    assert "1 of 4 used: NVIDIA A100-SXM4-40GB" in [finding["what"] for finding in findings]


@pytest.mark.usefixtures("here")
def test_problems_come_first_with_reason_and_fix(healthy: Path) -> None:
    edits = {"proc/sys/vm/zone_reclaim_mode": "1", "sys/devices/system/cpu/isolated": "3"}
    with spoilt(healthy, edits):
        shown = run_inside(["doctor", f"machine.root={healthy}"])
        plain = run_inside(["doctor", f"machine.root={healthy}"], "ascii")
    lines = [line.rstrip() for line in shown.out.splitlines()]
    assert lines[0] == "! memory      vm.zone_reclaim_mode=1"
    assert lines[1].strip().startswith("why: ") and "sudo sysctl vm.zone_reclaim_mode=0" in "".join(
        lines[1:6]
    )
    marks = [line[0] for line in lines[:-1] if line[0] != " "]
    assert [mark for at, mark in enumerate(marks) if at < marks.index("i")].count("!") == 1
    assert lines[-1].startswith("1 warning, 1 note; ")
    assert {line[0] for line in plain.out.splitlines()[:-1]} == {"!", "i", "?", "+", " "}


@pytest.mark.usefixtures("here")
def test_a_machine_of_one_node_has_nothing_to_balance() -> None:
    node = [{"id": 0, "package": 0, "cpus": "0-31", "gib": 64}]
    with short_lived() as folder:
        root = write_healthy(folder / "root", numa=node, threads={"none": True}, gpus=[], nics=[])
        edits = {**list_edits({"limits": {"locked": "1"}}), "proc/sys/kernel/numa_balancing": "1"}
        with spoilt(root, edits):
            _, findings = run_doctor(f"machine.root={root}", "nproc_per_node=2")
    assert not pick(findings, "error", "warning", "note")
    rules = {finding["rule"] for finding in findings}
    assert {"memory.one_node", "gpu.none"} <= rules and "limits.locked" not in rules


@pytest.mark.usefixtures("here")
def test_files_that_are_not_there_are_told_as_not_checked() -> None:
    with short_lived() as folder:
        root = write_healthy(folder / "root")
        with spoilt(root, dict.fromkeys(HEALTHY) | {GPUS: None}):
            _, findings = run_doctor(f"machine.root={root}", "nproc_per_node=4")
    unknown = {finding["rule"] for finding in pick(findings, "unknown")}
    for check in ("balancing", "huge_pages", "swap", "shm", "files", "clocks"):
        assert f"unchecked.{check}" in unknown
    assert not pick(findings, "error", "note")
    assert {one["rule"] for one in pick(findings, "warning")} == {"placement.probe"}, "MemTotal is missing"


@pytest.mark.usefixtures("here")
def test_a_snapshot_is_judged_as_far_as_it_goes(healthy: Path) -> None:
    plan = json.loads(run_inside(["plan", f"machine.root={healthy}", "format=json"]).out)
    snapshot = Path("plan.json")
    for gib, limit, level in ((256, None, "ok"), (300, None, "warning"), (200, 512 << 20, "warning")):
        for gpu in plan["machine"]["gpus"]:
            gpu["memory_mib"] = gib << 10
        plan["machine"]["limits"]["memory_kib"] = limit
        snapshot.write_text(json.dumps(plan))
        _, findings = run_doctor(f"machine.snapshot={snapshot}")
        (size,) = (one for one in findings if one["rule"] == "memory.size")
        assert (size["level"], size["values"]["total"]) == (level, 4 * gib << 20)
        assert len(pick(findings, "error", "warning", "note")) == (level != "ok")
        assert {finding["subject"] for finding in findings} == SUBJECTS
        unknown = {finding["rule"] for finding in pick(findings, "unknown")}
        assert {f"unchecked.{check}" for check in ("files", "clocks", "links")} <= unknown


def spoil(kind: str, path: str) -> bytes:
    """Garbage of a kind, the same in each run of the tests."""
    rng = random.Random(f"{kind} {path}")
    return {
        "bytes": rng.randbytes(300),
        "nothing": b"",
        "long": b"9" * 5000,
        "markup": "[bold]\x1b[31m {items} %s é".encode(),
    }[kind]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["bytes", "nothing", "long", "markup"])
def test_garbage_gives_findings_and_never_a_traceback(healthy: Path, kind: str) -> None:
    """In every file at once, and in some beside healthy ones."""
    with spoilt(healthy, {path: spoil(kind, path) for path in FILES}):
        done = run_inside(["doctor", f"machine.root={healthy}", "format=json"])
    findings = json.loads(done.out)["findings"]
    assert findings and not pick(findings, "error")
    with spoilt(healthy, {path: spoil(kind, path) for path in FILES[len(kind) % 7 :: 7]}):
        shown = run_inside(["doctor", f"machine.root={healthy}"])
    assert shown.code in (0, 1) and "\x1b" not in shown.out


PCI = ("0000:00:00.0", "0000:01:00.0")


MACHINE = Machine(
    cpus=(),
    nodes=(),
    gpus=tuple(Gpu(index, f"GPU-{index}", pci, 0, name="H100") for index, pci in enumerate(PCI)),
    allowed_cpus=frozenset(),
    allowed_mems=frozenset(),
)


@pytest.mark.parametrize("case", read_cases("machines.toml")["driver"], ids=lambda case: case["find"])
def test_what_only_a_driver_tells(case: dict[str, Any]) -> None:
    """No tree of files has it."""
    machine, health = replace(MACHINE, gpus=MACHINE.gpus[: case["gpus"]]), dict(case.get("health", {}))
    memory, cpus = Memory("default"), frozenset({0})
    ranks = tuple(RankPlan(gpu.index, gpu, cpus, cpus, memory, 2, 1) for gpu in machine.gpus)
    modes = zip(PCI, health.pop("persistence", ()), strict=False)
    gpus = [{"index": 0, "uuid": "", "name": "", "pci": pci, "persistence": mode} for pci, mode in modes]
    told = {"host": "", "node_rank": 0, "time": 0.0, "gpus": gpus, "health": {"live": True, **health}}
    facts = convert(Facts, told)
    rule, level = case["find"].split()
    judged = judge_machine(Case(Plan(machine, ranks), facts, environ={}))
    (finding,) = (one.to_json() for one in judged if one.rule == rule)
    assert finding["level"] == level and finding["values"].items() >= case["values"].items()
    assert finding["what"]
