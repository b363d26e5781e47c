"""The JSON form of plans and snapshots, and what is not one."""

import json
from dataclasses import replace

import pytest

from launcher.codec import DecodeError
from launcher.errors import UsageError
from launcher.plan.model import (
    Cache,
    Gpu,
    Limits,
    Machine,
    Nic,
    machine_from_json,
    machine_to_json,
    parse_machine,
    plan_to_json,
)
from launcher.plan.planner import plan
from launcher.runs.records import read_ranks

from .lab_machines import NAMES, ask, convert, load


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_reads_back_as_it_was(name: str) -> None:
    machine = convert(load(name))
    assert parse_machine(json.dumps(machine_to_json(machine))) == machine


def test_everything_that_a_machine_can_hold_reads_back() -> None:
    machine = convert(load("gh200"))
    gpu = Gpu(
        index=0,
        uuid="GPU-1",
        pci="10000:00:04.0",
        node=None,
        local_cpus=frozenset({1, 2, 7}),
        name="GPU",
        mig=("MIG-1", "MIG-2"),
        vendor="amd",
        path=("pci10000:00", "10000:00:01.0"),
        memory_mib=81920,
    )
    nic = Nic("mlx5_0", "0000:18:00.0", 1, ("pci0000:17",), "InfiniBand", 12.5, active=False)
    full = Machine(
        cpus=machine.cpus,
        nodes=machine.nodes,
        gpus=(gpu,),
        allowed_cpus=frozenset({1}),
        allowed_mems=frozenset(),
        isolated=frozenset({2}),
        memory_kib=7,
        nics=(nic, Nic("efa_0", "", None)),
        caches=(Cache(0, 3, 117760),),
        limits=Limits(2.5, 1024, 64, 4096),
        name="a machine",
        kernel="6.8",
        source="a page",
        warnings=("odd",),
    )
    assert machine_from_json(machine_to_json(full)) == full


def test_a_plan_has_the_form_that_the_design_fixes() -> None:
    machine = convert(load("dgx-a100"))
    made = plan(machine, ask(environ={"NCCL_DEBUG": "INFO"}))
    data = plan_to_json(made)
    assert list(data) == ["schema", "machine", "ranks", "warnings"]
    assert (data["schema"], data["warnings"]) == (1, [])
    text = json.dumps(data)
    first = json.loads(text)["ranks"][0]
    assert list(first) == [
        *("local_rank", "gpu", "cpus", "worker_cpus", "memory", "num_workers", "omp_num_threads"),
        *("nic", "env", "notes", "variables"),
    ]
    assert first["gpu"] == {"index": 0, "uuid": "GPU-00000000-aaaa", "pci": "0000:07:00.0"}
    assert (first["cpus"], first["worker_cpus"]) == ("48-55,176-183", "32-39,48-55,160-167,176-183")
    assert first["memory"] == {"policy": "preferred", "nodes": "3"}
    assert {"name": "NCCL_DEBUG", "value": "INFO", "from": "user"} in first["variables"]
    assert first["env"] == {item["name"]: item["value"] for item in first["variables"] if "why" in item}
    assert list(first["env"]) == sorted(first["env"])
    ranks = read_ranks(text.encode())
    assert [replace(rank, gpu=None) for rank in ranks] == [replace(rank, gpu=None) for rank in made.ranks]
    assert parse_machine(text) == machine
    without = plan_to_json(plan(convert(load("cpu-only-2s")), ask(1)))["ranks"][0]
    assert without["gpu"] is None
    with pytest.raises(DecodeError, match="variables"):
        read_ranks(json.dumps({**data, "ranks": [{**first, "variables": {"A": "1"}}]}).encode())


WHOLE = json.dumps(machine_to_json(convert(load("gh200"))))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WHOLE[: len(WHOLE) // 2], "cut short"),
        ("", "cut short"),
        ("[" * 100_000, "cut short"),
        ("[]", "not a machine snapshot"),
        ("null", "not a machine snapshot"),
        ('{"name": "dgx-a100", "numa": []}', "not a machine snapshot .an object with name, numa."),
        ('{"ranks": []}', "not a machine snapshot"),
        (WHOLE.replace('"schema": 1', '"schema": 2'), "schema 2, and this version reads 1: update"),
        (WHOLE.replace('"schema": 1', '"schema": "1"'), "schema '1'"),
        (WHOLE.replace('"schema": 1', '"schema": true'), "schema True"),
        (WHOLE.replace('"limits": {"cpus": null', '"limits": {"cpus": -2'), "damaged"),
        (WHOLE.replace('"id": 1,', '"id": -1,'), "damaged"),
        (WHOLE.replace('"capacity": 1024', '"capacity": true'), "damaged"),
        (WHOLE.replace('"l3": 0,', ""), "damaged"),
        (WHOLE.replace('"limits": {"cpus": null', '"limits": {"cpus": "1"'), "damaged"),
        (WHOLE.replace('"files": null', '"files": 1.5'), "damaged"),
        (WHOLE.replace('"distances": [10, ', '"distances": ['), "damaged"),
        (WHOLE.replace('"allowed_cpus": "', '"allowed_cpus": "x'), "damaged"),
        (WHOLE.replace('"id": 1,', '"id": 0,'), "damaged"),
        (WHOLE.replace('"normal": true', '"normal": 1'), "damaged"),
        (WHOLE.replace('"warnings": []', '"warnings": [1]'), "damaged"),
        (WHOLE.replace('"gpus": [', '"gpus": [3, '), "damaged"),
    ],
)
def test_what_is_no_snapshot_is_a_usage_error_with_its_fix(text: str, message: str) -> None:
    assert text != WHOLE
    with pytest.raises(UsageError, match=message) as caught:
        parse_machine(text)
    assert caught.value.exit_code == 2
    assert ": " in str(caught.value)
