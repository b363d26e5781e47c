"""The user's variables (GPUs, the allocator, garbage collection), and the JSON of snapshots and plans."""

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.codec import DecodeError
from launcher.errors import UsageError
from launcher.inprocess.launch_inprocess.garbage_collection import parse_policy
from launcher.plan.model import (
    Cache,
    Gpu,
    Limits,
    Machine,
    Nic,
    Request,
    machine_to_json,
    parse_machine,
    plan_to_json,
)
from launcher.plan.planner import plan
from launcher.plan.variables import KEYS, find_fault
from launcher.runs.records import read_ranks
from tests.seam import clean_environ

from .lab_machines import ask, convert, describe, load

HERE = Path(__file__).parent
CASES = tomllib.loads((HERE / "devices.toml").read_text())
CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
NVIDIA = (
    Gpu(0, "GPU-aaaa1111-00", "0000:07:00.0", 0),
    Gpu(1, "GPU-aaaa2222-00", "0000:0f:00.0", 0),
    Gpu(2, "GPU-bbbb3333-00", "10000:00:04.0", 0),
    Gpu(3, "GPU-cccc4444-00", "0000:47:00.1", 0, mig=("MIG-d1", "MIG-d2")),
)
AMD = tuple(
    Gpu(at, uuid, f"0000:{at}3:00.0", 0, vendor="amd")
    for at, uuid in enumerate(("GPU-1111111111111111", "GPU-1111aaaa22222222", "GPU-bbbb333333333333", ""))
)
MACHINE = convert(describe(["0-15"], []))


def see(gpus: tuple[Gpu, ...], environ: dict[str, str]) -> tuple[list[Gpu], list[dict[str, str]], list[str]]:
    """The GPUs of a job's ranks, what shows each alone, and the warnings about devices."""
    made = plan(replace(MACHINE, gpus=gpus), ask(environ=environ, devices="own"))
    told = [warning for warning in made.warnings if warning.rule in ("invalid", "repeated")]
    assert all(warning.fix for warning in told)
    shown = [{name: value for name, value in rank.env if name in (CUDA, HIP)} for rank in made.ranks]
    return [rank.gpu for rank in made.ranks if rank.gpu], shown, list(map(str, told))


def check_warnings(warnings: list[str], parts: list[str]) -> None:
    assert len(warnings) == len(parts), warnings
    assert all(part in text for part, text in zip(parts, warnings, strict=True)), warnings


@pytest.mark.parametrize(("value", "uuids", "warned"), [(*row[:2], row[2:]) for row in CASES["cuda"]])
def test_cuda(value: str, uuids: list[str], warned: list[str]) -> None:
    gpus, shown, warnings = see(NVIDIA, {CUDA: value})
    assert [gpu.uuid for gpu in gpus] == uuids
    assert see(NVIDIA[::-1], {CUDA: value}) == (gpus, shown, warnings)
    assert shown == ([{CUDA: uuid} for uuid in uuids] or [{}])
    check_warnings(warnings, warned)


@pytest.mark.parametrize(
    ("environ", "indices", "warned"),
    [({ROCR: row[0]}, row[1], row[2:]) for row in CASES["rocr"]]
    + [({name: row[0]}, row[1], row[2:]) for row in CASES["hip"] for name in (HIP, CUDA)]
    + [
        ({n: v for n, v in zip((ROCR, HIP, CUDA), row, strict=False) if v != "-"}, row[3], row[4:])
        for row in CASES["together"]
    ],
)
def test_rocm(environ: dict[str, str], indices: list[int], warned: list[str]) -> None:
    gpus, shown, warnings = see(AMD, environ)
    assert [gpu.index for gpu in gpus] == indices
    assert all(set(one) == {HIP} for one in shown) or not gpus
    check_warnings(warnings, warned)


def test_which_gpus_are_seen_and_how_each_is_shown_alone() -> None:
    gpus, _, _ = see(NVIDIA, {})
    assert [gpu.uuid for gpu in gpus] == [*(gpu.uuid for gpu in NVIDIA[:3]), "MIG-d1", "MIG-d2"]
    assert (gpus[4].index, gpus[4].pci, gpus[4].node, gpus[4].mig) == (3, "0000:47:00.1", 0, ())
    nameless = (Gpu(0, "", "0000:07:00.0", 0), Gpu(1, "", "0000:0f:00.0", 0))
    assert see(nameless, {CUDA: "1"})[1] == [{CUDA: "1"}]
    shown = see(AMD, {ROCR: "3,2,1", CUDA: "2,0"})[1]
    assert shown == [{HIP: "2"}, {HIP: "0"}], "numbers are within what ROCR shows"
    both = (*NVIDIA, Gpu(4, "", "0000:c0:00.0", 0, vendor="amd"))  # it is for the screen
    assert see(both, {})[0] == gpus and see(both, {CUDA: "4"})[0] == []


@given(st.lists(st.sampled_from(["0", "1", "2", "-1", "", "x", " 2", "00"]), max_size=5))
def test_numbers_are_read_as_torch_reads_them(parts: list[str]) -> None:
    value = ",".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CUDA, value)
        indices: list[Any] = torch.cuda._parse_visible_devices()
    assert [gpu.index for gpu in see(NVIDIA, {CUDA: value})[0]] == list(map(int, indices))


def test_the_policy_of_garbage_collection_is_read_in_the_rank_as_the_plan_writes_it() -> None:
    used = {"synchronized": "warmup every", "disabled": "every", "frozen": "warmup", "default": ""}
    for name, steps in used.items():
        for log in (False, True):
            request = Request(nproc_per_node=1)
            gc = replace(request.gc, policy=name, warmup=7, every=8, log=log)
            text = dict(plan(MACHINE, replace(request, gc=gc)).ranks[0].env)["LAUNCH_GC"]
            expected = (name, 7 if "warmup" in steps else 30, 8 if "every" in steps else 50, log)
            assert parse_policy(text) == expected


# The allocator

ALLOCATOR = tomllib.loads((HERE / "allocator.toml").read_text())
CORE, RIGHT, WRONG = ALLOCATOR["core"], ALLOCATOR["right"], ALLOCATOR["wrong"]
LAX = frozenset({"64abc", "1.5", "-1", "1e3", "99999999999", "[]", "[64]"})
"""Wrong values that torch takes all the same, for something else than they look like."""
INSTALLED = tuple(map(int, version("torch").split(".")[:2]))
HEADER = Path(str(distribution("torch").locate_file("torch/include/c10/cuda/CUDAAllocatorConfig.h")))
TRY = """
import json, sys, torch
def takes(text):
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (ValueError, RuntimeError, IndexError):
        return False
    finally:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    return True
print(json.dumps([takes(text) for text in json.load(sys.stdin)]))
"""
BROKEN = ("a", ":1", "a:1,,b:2", "a:[1", "a:1]", "a:[1][2]", "a:b:c", "[a:1", "a:1;b:2:3")


def settle(**more: Any) -> dict[str, str]:
    """The variables of a rank with a GPU."""
    return dict(plan(replace(MACHINE, gpus=NVIDIA[:1]), ask(**more)).ranks[0].env)


def test_the_installed_torch_takes_what_the_table_takes_and_what_the_launcher_writes() -> None:
    """Every right and wrong value of its settings for all accelerators; torch is laxer with numbers alone."""
    values = [
        (name, value)
        for name in CORE
        for value in (*RIGHT[KEYS[name][0]], *WRONG[KEYS[name][0]])
        if value and KEYS[name][1] <= INSTALLED
    ]
    written = [settle(allocator=given)["PYTORCH_ALLOC_CONF"] for given in ALLOCATOR["configured"]]
    texts = [f"{name}:{value}" for name, value in values] + written
    done = subprocess.run(
        [sys.executable, "-c", TRY],
        input=json.dumps(texts),
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answers: list[bool] = json.loads(done.stdout)
    differ = [
        (name, value)
        for (name, value), takes in zip(values, answers[: len(values)], strict=True)
        if takes == bool(find_fault(name, value)) and not (takes and value in LAX)
    ]
    assert differ == []
    refused = [text for text, takes in zip(written, answers[len(values) :], strict=True) if not takes]
    assert refused == [] and not all(answers)


def test_the_installed_torch_has_the_settings_that_the_table_says() -> None:
    body = re.search(r"getKeys\(\) \{.*?keys\{(.*?)\};", HEADER.read_text(), re.DOTALL)
    assert body, "torch before 2.10 has no list of its keys"
    joined = re.sub(r'"\s+"', "", re.sub(r"//[^\n]*", "", body[1]))
    known = {key for key, (_, since) in KEYS.items() if since <= INSTALLED and key not in CORE}
    assert known == set(re.findall(r'"(\w+)"', joined))


def test_right_values_of_the_user_are_kept_and_wrong_ones_left_alone() -> None:
    for name, (kind, _) in KEYS.items():
        for value in RIGHT[kind]:
            environ = {"PYTORCH_CUDA_ALLOC_CONF": f"{name}:{value}"}
            assert settle(environ=environ, allocator={})["PYTORCH_CUDA_ALLOC_CONF"] == f"{name}:{value}"
        for value in WRONG[kind]:
            assert find_fault(name, value), (name, value)
    for text in BROKEN:
        assert "PYTORCH_CUDA_ALLOC_CONF" not in settle(environ={"PYTORCH_CUDA_ALLOC_CONF": text})


# JSON


def test_everything_that_a_machine_can_hold_reads_back() -> None:
    machine = convert(load("gh200"))
    gpu = Gpu(
        index=0,
        uuid="GPU-1",
        pci="10000:00:04.0",
        node=None,
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
    assert parse_machine(json.dumps(machine_to_json(full))) == full


def test_a_plan_has_the_form_that_the_docs_have() -> None:
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
    assert plan_to_json(plan(convert(load("cpu-only-2s")), ask(1)))["ranks"][0]["gpu"] is None
    with pytest.raises(DecodeError, match="variables"):
        read_ranks(json.dumps({**data, "ranks": [{**first, "variables": {"A": "1"}}]}).encode())


WHOLE = json.dumps(machine_to_json(convert(load("gh200"))))
DAMAGED = (
    *(WHOLE[: len(WHOLE) // 2], "", "[" * 100_000, "[]", "null", '{"name": "dgx-a100", "numa": []}'),
    *('{"ranks": []}', WHOLE.replace('"limits": {"cpus": null', '"limits": {"cpus": -2')),
    WHOLE.replace('"id": 1,', '"id": -1,'),
    WHOLE.replace('"capacity": 1024', '"capacity": true'),
    WHOLE.replace('"l3": 0,', ""),
    WHOLE.replace('"limits": {"cpus": null', '"limits": {"cpus": "1"'),
    WHOLE.replace('"files": null', '"files": 1.5'),
    WHOLE.replace('"distances": [10, ', '"distances": ['),
    WHOLE.replace('"allowed_cpus": "', '"allowed_cpus": "x'),
    WHOLE.replace('"id": 1,', '"id": 0,'),
    WHOLE.replace('"normal": true', '"normal": 1'),
    WHOLE.replace('"warnings": []', '"warnings": [1]'),
    WHOLE.replace('"gpus": [', '"gpus": [3, '),
)


def test_what_is_no_snapshot_is_a_usage_error_with_its_fix() -> None:
    for text in DAMAGED:
        assert text != WHOLE
        with pytest.raises(UsageError, match=r"or damaged or cut short \(.*\): make one") as caught:
            parse_machine(text)
        assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match="schema 2, and this version reads 1: update"):
        parse_machine(WHOLE.replace('"schema": 1', '"schema": 2'))
