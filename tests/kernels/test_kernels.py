"""On real kernels: the machine as probed is the one that was booted, and every rank has what was planned.

Each machine is booted once in a session, when its first test asks for it, and one at a time.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.cpulist import format_cpulist, parse_cpulist
from launcher.plan.model import Machine, parse_machine
from tests.plan.lab_machines import convert, score

from .guest.init import Scenario
from .machine import SHAPES, GuestError, Shape, boot, pack_interpreter, pack_programs, write_initramfs

pytestmark = pytest.mark.kernels
Report = dict[str, Any]
Rank = dict[str, Any]
Case = tuple[Shape, Scenario, Report]
"""A machine, a job on it, and what came of it there: the plan, and a report of each rank."""
NAMES = [f"{shape.name}/{scenario.name}" for shape in SHAPES for scenario in shape.scenarios]
ENOUGH = 1500
"""Pages of 4 KiB that at least came when 8 MiB were touched; huge pages blur the rest."""


CACHE = Path(__file__).parents[2] / ".cache" / "kernels"
"""Where a downloaded kernel is kept."""


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """A kernel image and what runs on it; a skip that says why where they can't be had."""
    command = [str(Path(__file__).with_name("get-kernel")), str(CACHE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        (pytest.fail if os.environ.get("LAUNCH_CI") else pytest.skip)(done.stderr.splitlines()[-1])
    folder = tmp_path_factory.mktemp("lab")
    programs = pack_programs(folder / "programs.cpio", folder / "stage")
    return Path(done.stdout.strip()), pack_interpreter(folder / "python.cpio"), programs


@pytest.fixture(scope="session")
def report_of(lab: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Shape], Report]:
    """The report of a shape's guest."""
    reports: dict[str, Report | GuestError] = {}

    def find(shape: Shape) -> Report:
        if shape.name not in reports:
            folder = tmp_path_factory.mktemp(shape.name)
            initramfs = write_initramfs(shape, lab[1:], folder)
            try:
                reports[shape.name] = boot(shape, lab[0], initramfs, folder)
            except GuestError as error:
                reports[shape.name] = error
            initramfs.unlink()
        report = reports[shape.name]
        if isinstance(report, GuestError):
            reports[shape.name] = GuestError(f"{shape.name}: no report, as shown above")
            pytest.fail(str(report), pytrace=False)
        return report

    return find


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, report_of: Callable[[Shape], Report]) -> Case:
    name = str(request.param)
    shape = next(shape for shape in SHAPES if name.startswith(f"{shape.name}/"))
    scenario = next(entry for entry in shape.scenarios if name == f"{shape.name}/{entry.name}")
    report = report_of(shape)
    if error := report.get("error") or report["scenarios"][scenario.name].get("error"):
        pytest.fail(f"in the guest: {error}", pytrace=False)
    return shape, scenario, report["scenarios"][scenario.name]


@pytest.fixture
def machine(case: Case) -> Machine:
    """The machine as the probe found it in the guest."""
    return parse_machine(json.dumps(case[2]["plan"]["machine"]))


def test_the_probe_finds_the_cpus_that_were_booted(case: Case, machine: Machine) -> None:
    shape, scenario, _ = case
    expected = convert(shape.describe(scenario))
    assert machine.cpus == expected.cpus
    assert machine.allowed_cpus == expected.allowed_cpus
    assert machine.isolated == expected.isolated
    assert {(cache.id, cache.level) for cache in machine.caches} == {(cpu.l3, 3) for cpu in expected.cpus}
    assert machine.warnings == ()


def test_the_probe_finds_the_memory_that_was_given(case: Case, machine: Machine) -> None:
    shape, scenario, _ = case
    expected = convert(shape.describe(scenario))
    assert [(n.id, n.distances) for n in machine.nodes] == [(n.id, n.distances) for n in expected.nodes]
    assert [n.id for n in machine.nodes if n.normal] == [n for n, mib in enumerate(shape.memory) if mib]
    for node, mib in zip(machine.nodes, shape.memory, strict=True):
        # The kernel keeps some for itself.
        assert 0.7 * mib <= node.memory_kib / 1024 <= mib
    assert machine.allowed_mems == expected.allowed_mems
    assert machine.limits.cpus == scenario.quota
    assert machine.limits.memory_kib == (scenario.memory_mib << 10 if scenario.memory_mib else None)
    assert machine.limits.shm_kib == 64 << 10


def test_the_probe_finds_the_devices_where_they_are(case: Case, machine: Machine) -> None:
    shape, scenario, _ = case
    expected = convert(shape.describe(scenario)).gpus
    usable = [gpu for gpu in expected if gpu.index not in scenario.deny_gpus]
    assert [gpu.index for gpu in machine.gpus] == list(range(len(usable)))
    for gpu, planned in zip(machine.gpus, usable, strict=True):
        assert (gpu.pci, gpu.node) == (planned.pci, planned.node)
        assert gpu.uuid.startswith(f"GPU-{planned.index:08x}-")
    bridges = [(f"pci0000:{bus:02x}", len(gpus)) for _, bus, gpus in shape.list_bridges()]
    if not scenario.deny_gpus:
        roots = [bridge for bridge, count in bridges for _ in range(count)]
        assert [gpu.path[0] for gpu in machine.gpus] == roots


def test_every_rank_has_what_was_planned(case: Case) -> None:
    _, scenario, report = case
    plan = report["plan"]["ranks"]
    assert len(plan) == len(report["ranks"]) == (scenario.nproc_per_node or len(plan))
    assert len(report["alone"]) == (len(plan) if scenario.alone else 0)
    for started in (report["ranks"], report["alone"]):
        for planned, rank in zip(plan, started, strict=False):
            check_process(planned, rank)


def check_process(planned: Rank, rank: Rank) -> None:
    """The kernel's word on a rank against its plan: the process, its CPUs, its variables."""
    assert rank["exit"] == 0, rank["shim"]
    found = rank["program"]
    assert found["pid"] == rank["pid"]
    assert found["cpus_allowed"] == planned["cpus"] == format_cpulist(frozenset(found["affinity"]))
    assert {name: found["env"].get(name) for name in planned["env"]} == planned["env"]
    assert f"cpus {planned['cpus']}" in rank["shim"]


def test_memory_comes_from_the_planned_node(case: Case) -> None:
    _, scenario, report = case
    plan = report["plan"]["ranks"]
    for started in (report["ranks"], report["alone"]):
        for planned, rank in zip(plan, started, strict=False):
            if scenario.deny_mempolicy:
                check_refused(planned, rank)
            else:
                check_pages(report["plan"]["machine"], planned, rank)


def check_pages(machine: dict[str, Any], planned: Rank, rank: Rank) -> None:
    """Policy and pages; the far ones, touched from another node's CPUs, show that the policy is in force."""
    found = rank["program"]
    node = planned["memory"]["nodes"]
    if planned["memory"]["policy"] == "default":
        assert found["policy"] == "default"
        return
    assert planned["memory"]["policy"] == "preferred"
    assert found["policy"] == f"prefer:{node}"
    assert set(found["home"]) == {node}
    assert found["home"][node] >= ENOUGH
    elsewhere = parse_cpulist(machine["allowed_cpus"]) - find_cpus(machine, int(node))
    assert (found["far"] is None) == (not elsewhere)
    if found["far"] is not None:
        assert set(found["far"]) == {node}
        assert found["far"][node] >= ENOUGH


def find_cpus(machine: dict[str, Any], node: int) -> frozenset[int]:
    """CPUs of a NUMA node in a snapshot."""
    cores = [core for group in machine["cores"] if group["node"] == node for core in group["cores"]]
    return frozenset().union(*map(parse_cpulist, cores))


def check_refused(planned: Rank, rank: Rank) -> None:
    """Where the calls are forbidden the rank runs, says so, and its memory follows the touching CPU."""
    assert "was refused" in rank["shim"]
    found = rank["program"]
    assert found["policy"] == "default"
    assert set(found["home"]) == {planned["memory"]["nodes"]}
    assert planned["memory"]["nodes"] not in found["far"]


def test_the_exclusive_plan_is_the_best_that_the_machine_allows(case: Case) -> None:
    shape, scenario, report = case
    if scenario.binding == "exclusive":
        result = score.score(shape.describe(scenario), report["plan"])
        short = {name: pair for name, pair in result.items() if not score.holds({name: pair})}
        assert short == {}


def test_the_other_bindings_give_a_part_of_the_machine(case: Case, machine: Machine) -> None:
    _, scenario, report = case
    parts = {"numa": "node", "socket": "package", "l3": "l3"}
    groups: dict[int, set[int]] = {}
    for cpu in machine.cpus:
        if cpu.id in machine.allowed_cpus:
            groups.setdefault(getattr(cpu, parts.get(scenario.binding, ""), 0), set()).add(cpu.id)
    for rank in report["plan"]["ranks"] if scenario.binding != "exclusive" else ():
        mask = parse_cpulist(rank["cpus"])
        assert mask in groups.values()
        node = machine.gpus[rank["gpu"]["index"]].node
        assert any(cpu.id in mask and node in (None, cpu.node) for cpu in machine.cpus)


def test_a_job_away_from_its_gpu_is_told(case: Case) -> None:
    shape, scenario, report = case
    expected = convert(shape.describe(scenario))
    used = {rank["gpu"]["pci"] for rank in report["plan"]["ranks"] if rank["gpu"]}
    usable = {cpu.node for cpu in expected.cpus if cpu.id in expected.allowed_cpus} | {None}
    away = [gpu for gpu in expected.gpus if gpu.node not in usable]
    warnings = report["plan"]["warnings"]
    told = any(re.search("needs CPUs .*, next to its GPU,", warning) for warning in warnings)
    assert told == any(gpu.pci in used for gpu in away)
