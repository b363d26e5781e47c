"""What `launch` makes of a machine with GPUs: topo, plan, doctor, preflight, and what CUDA shows to ranks."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.doctor.model import Facts
from launcher.plan.model import Gpu, Request
from launcher.plan.planner import plan
from launcher.preflight import PreflightRequest, run_checks
from launcher.probe.machine import probe
from tests.gpu.programs import describe_device
from tests.gpu.proof import PROGRAMS, Proof, together

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
HOST = "this"
BOUND = Path("/sys/bus/pci/drivers/nvidia")


def test_topo_plan_and_doctor(tools: Proof) -> None:
    record_facts(tools)
    saved = tools.verb("topo", "topo", "save=machine.json")
    snapshot = saved.run.parent / "machine.json"
    tools.keep("machine.json", snapshot.read_text())
    tools.keep("machine.txt", tools.verb("explain", "plan", "explain=true").out)
    planned = tools.verb("plan", "plan", "format=json")
    tools.keep("plan.json", planned.out)
    ranks = json.loads(planned.out)["ranks"]
    again = tools.verb(
        "again", "plan", f"machine.snapshot={snapshot}", f"nproc_per_node={len(ranks)}", "format=json"
    )
    names = ("gpu", "cpus", "worker_cpus", "memory", "nic")
    for rank, other in zip(ranks, json.loads(again.out)["ranks"], strict=True):
        tools.record("Ranks as planned", {name: rank[name] for name in names})
        assert [rank[name] for name in names] == [other[name] for name in names]
    found = tools.verb("doctor", "doctor", "format=json", code=None)
    assert found.code in (0, 1), found.err
    tools.keep("doctor.json", found.out)
    for one in json.loads(found.out)["findings"]:
        if one["level"] in ("warning", "error"):
            tools.record("Doctor", {"level": one["level"], "found": one["what"]})
    if tools.cpu:
        assert not any(rank["gpu"] for rank in ranks)
    else:
        tools.check_gpu()
        assert all(rank["gpu"] for rank in ranks)
        assert len(ranks) == torch.cuda.device_count() > 0


def record_facts(tools: Proof) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    began = time.monotonic()
    try:
        address = socket.gethostbyname(socket.gethostname())  # as every start of torchrun does
    except OSError as error:
        address = str(error)
    facts = {
        "GPUs": "; ".join(str(describe_device(index)) for index in range(count)) or "none",
        "warnings": "; ".join(str(one.message) for one in said),
        "Python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "NCCL": torch.cuda.nccl.version() if torch.version.cuda else None,  # type: ignore[no-untyped-call]
        "kernel": platform.release(),
        "CPUs": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "compiler": shutil.which("cc"),
        "Python.h": Path(sysconfig.get_paths()["include"], "Python.h").exists(),
        "host name": f"{address}, {time.monotonic() - began:.3f} s",
    }
    for name, value in facts.items():
        tools.record("Machine", {"fact": name, "value": value})


def test_nvml_beside_the_drivers_files_nvidia_smi_and_torch(proof: Proof) -> None:
    proof.need_gpu()
    machine, quick = probe("/"), probe("/", quick=True)
    gpus = machine.gpus
    assert gpus, machine.warnings
    # The quick probe asks the driver's files first; they have no memory, and may spell the name otherwise.
    plain = [replace(gpu, name="", memory_mib=0) for gpu in gpus]
    assert [replace(gpu, name="", memory_mib=0) for gpu in quick.gpus] == plain
    if BOUND.is_dir():
        bound = sorted(path.name for path in BOUND.iterdir() if path.name.count(":") == 2)
        assert not bound or bound == sorted(gpu.pci for gpu in gpus)
    asked = "--query-gpu=uuid,pci.bus_id,name,memory.total,mig.mode.current,persistence_mode"
    done = subprocess.run(
        ["nvidia-smi", asked, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
    )
    by_smi = {row[0]: row[1:] for row in (line.split(", ") for line in done.stdout.splitlines())}
    for index, gpu in enumerate(gpus):
        pci, name, memory, mig, persistence = by_smi[gpu.uuid]
        assert (gpu.index, gpu.pci, gpu.name, gpu.memory_mib) == (
            index,
            pci.lower()[4:] if pci.startswith("0000") and len(pci) > 12 else pci.lower(),
            name,
            int(memory),
        )
        assert bool(gpu.mig) <= (mig == "Enabled")
        assert not gpu.path or gpu.path[0].startswith("pci")
        assert gpu.node is None or gpu.node in {node.id for node in machine.nodes}
        row = {"uuid": gpu.uuid, "pci": gpu.pci, "name": gpu.name, "MiB": gpu.memory_mib, "MIG": mig}
        more = {"node": gpu.node, "path": " ".join(gpu.path)}
        proof.record("GPUs", {**row, **more, "persistence": persistence})
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    for device in map(describe_device, range(torch.cuda.device_count())):
        one = by_uuid.get(f"GPU-{device['uuid']}")
        if one is None:
            assert any(gpu.mig for gpu in gpus), device
            continue
        assert (device["pci"], device["name"]) == (one.pci, one.name)
        assert 0.9 < device["memory_mib"] / one.memory_mib <= 1
    for warning in machine.warnings:
        proof.record("Warnings of the probe", warning)


def list_forms(gpus: Sequence[Gpu]) -> dict[str, str | None]:
    first, last = gpus[0], gpus[-1]
    return {
        "unset": None,
        "index": str(last.index),
        "two indices, the second of no GPU": f"0,{len(gpus)}",
        "index of no GPU": str(len(gpus)),
        "index twice": "0,0",
        "UUID": last.uuid,
        "prefix of a UUID": last.uuid[:12],
        "UUID, then a number": f"{first.uuid},0",
        "UUID of no GPU": "GPU-00000000-0000-0000-0000-000000000000",
        "UUID twice": f"{first.uuid},{first.uuid}",
        "empty": "",
        "-1": "-1",
        "SLURM's NoDevFiles": "NoDevFiles",
        **{f"MIG instance {uuid}": uuid for gpu in gpus for uuid in gpu.mig},
    }


def test_cuda_shows_what_the_launcher_expects(proof: Proof) -> None:
    proof.need_gpu()
    machine = probe("/")
    gpus = machine.gpus
    if len(gpus) < 2 or not any(gpu.mig for gpu in gpus):
        proof.record("Not proved here", f"{len(gpus)} GPUs, MIG: {any(gpu.mig for gpu in gpus)}")

    def look(form: tuple[str, str | None]) -> tuple[str, list[str], list[str]]:
        name, value = form
        setting = {} if value is None else {VISIBLE: value}
        command = ["env", *(["-u", VISIBLE] if value is None else []), sys.executable, PROGRAMS, "show"]
        ended = proof.run(name, command, 0, 60, {ORDER: "PCI_BUS_ID", **setting})
        made = plan(machine, Request(environ=setting))
        expected = [rank.gpu.uuid for rank in made.ranks if rank.gpu]
        shown = json.loads(ended.out.splitlines()[-1])["devices"]
        return name, [name_uuid(device["uuid"], expected) for device in shown], expected

    found = together(look, list_forms(gpus).items())
    for name, shown, expected in found:
        row = {"form": name, "CUDA shows": len(shown), "launch expects": len(expected)}
        proof.record(VISIBLE, {**row, "same": shown == expected})
    assert [one for one in found if one[1] != one[2]] == []


def name_uuid(uuid: str, expected: Sequence[str]) -> str:
    """A UUID of torch's as NVML has it: that of a MIG instance, if one is expected."""
    return next((name for name in (f"MIG-{uuid}", uuid) if name in expected), f"GPU-{uuid}")


@pytest.mark.parametrize("form", ["all", "own", "spread", "index", "uuid", "prefix and own", "fastest first"])
def test_a_rank_finds_the_gpu_and_cores_of_its_plan(proof: Proof, form: str) -> None:
    last = None if proof.cpu else probe("/").gpus[-1]
    settings, environ = [f"devices={form}"], dict[str, str]()
    if form == "fastest first":
        settings, environ = [], {ORDER: "FASTEST_FIRST"}
    elif form not in ("all", "own", "spread"):
        values = (
            {"index": str(last.index), "uuid": last.uuid, "prefix and own": last.uuid[:14]} if last else {}
        )
        settings, environ = ["devices=own"] * (form == "prefix and own"), {VISIBLE: values.get(form, "")}
        environ |= {ORDER: "PCI_BUS_ID"} if form == "index" else {}
    ended = proof.program("run", "show", settings=settings, **environ)
    shown: dict[str, Any] = json.loads(ended.read_rank().splitlines()[-1])
    (plan,) = ended.run.glob("plan-*.json")
    planned = json.loads(plan.read_text())["ranks"][0]["gpu"]
    assert set(shown["cpus"]) <= os.sched_getaffinity(0)
    if last is None:
        assert planned is None and not shown["devices"]
        return
    device, environ = shown["devices"][0], shown["environ"]
    proof.record("Runs", {"form": form, "devices": len(shown["devices"]), VISIBLE: environ[VISIBLE]})
    assert (device["pci"], name_uuid(device["uuid"], [planned["uuid"]])) == (planned["pci"], planned["uuid"])
    assert form not in ("index", "uuid", "prefix and own") or planned["uuid"] == last.uuid
    assert "own" not in form or len(shown["devices"]) == 1
    assert environ[ORDER] == ("FASTEST_FIRST" if form == "fastest first" else "PCI_BUS_ID")


def test_the_work_of_a_node(proof: Proof) -> None:
    before = [] if proof.cpu else read_memory()
    runs = {kind: check_node(proof, kind) for kind in (["light"] if proof.cpu else ["light", "deep"])}
    for kind, facts in runs.items():
        names = [f"GPU {gpu.index}" for gpu in facts.gpus]
        assert [f"{one.measure} {one.where}: {one.problem}" for one in facts.work if one.problem] == []
        for measure in () if proof.cpu else ("matmul", "copy_to", "copy_from"):
            assert [one.where for one in facts.work if one.measure == measure and one.value] == names, kind
        if len(names) > 1:
            assert "all_reduce" in {one.measure for one in facts.work if one.value}
    if not proof.cpu:
        assert len({one.checksum for facts in runs.values() for one in facts.work if one.checksum}) == 1
        assert all(now <= then + 64 for now, then in zip(read_memory(), before, strict=True)), before


def check_node(proof: Proof, kind: str) -> Facts:
    """Run the node's program as a job does."""
    seconds = {"light": 10.0, "deep": 60.0}[kind]
    request = PreflightRequest(kind, (HOST,), seconds, time.time())
    mark, _, value = proof.mark.partition("=")
    answers = run_checks(request.command, request, {**os.environ, "SLURMD_NODENAME": HOST, mark: value})
    facts = answers.facts[HOST]
    proof.keep(f"preflight-{kind}.json", json.dumps([str(one) for one in facts.work], indent=1))
    for one in facts.work:
        row = {"kind": kind, "measure": one.measure, "where": one.where, "value": one.value, "unit": one.unit}
        proof.record("Preflight", {**row, "device": one.device, "remark": one.problem or one.reason})
    proof.record("Seconds of preflight", {"kind": kind, "seconds": answers.seconds})
    assert answers.seconds <= seconds + 2
    return facts


def read_memory() -> list[int]:
    """MiB that are used on each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return [int(line) for line in done.stdout.split()]
