"""What `launch` makes of the machine: its facts, topo, plan and doctor, and NVML beside other sources."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sysconfig
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.probe.machine import probe
from tests.gpu.programs import describe_device
from tests.gpu.proof import Proof

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]
LOOKED_AT = (
    *("proc/driver/nvidia/version", "proc/driver/nvidia/gpus/*/*", "proc/driver/nvidia/capabilities/*"),
    *("dev/nvidia*", "dev/dxg", "dev/kfd", "sys/bus/pci/drivers/nvidia/*", "sys/class/infiniband/*"),
    *("sys/fs/cgroup/cpu.max", "proc/self/cgroup", "sys/devices/system/node/node*/cpulist"),
    *("sys/devices/system/cpu/online", "proc/meminfo", "etc/hosts"),
)
"""Files below the root that are kept, so that the machine can be studied afterwards."""
SMI = (["nvidia-smi"], ["nvidia-smi", "-L"], ["nvidia-smi", "topo", "-m"], ["nvidia-smi", "-q"])
BOUND = Path("/sys/bus/pci/drivers/nvidia")


def test_topo_plan_and_doctor(tools: Proof) -> None:
    record_facts(tools)
    saved = tools.verb("topo", "topo", "save=machine.json")
    snapshot = saved.run.parent / "machine.json"
    tools.keep("machine.json", snapshot.read_text())
    explained = [tools.verb(verb, verb, "explain=true").out for verb in ("topo", "plan")]
    tools.keep("machine.txt", "\n".join([*explained, *list_files()]))
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


def list_files() -> list[str]:
    """The machine's files, and what nvidia-smi says."""
    found = []
    for path in (path for pattern in LOOKED_AT for path in sorted(Path("/").glob(pattern))):
        text = "not a file"
        if path.is_file() and not path.is_symlink():
            try:
                text = path.read_bytes()[:2000].decode(errors="replace")
            except OSError as error:
                text = str(error)
        found.append(f"{path}: {text}")
    for command in SMI if shutil.which("nvidia-smi") else ():
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        found.append(f"=== {command}: {done.returncode}\n{done.stdout}{done.stderr}")
    return found


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
    online = {cpu.id for cpu in machine.cpus}
    for index, gpu in enumerate(gpus):
        pci, name, memory, mig, persistence = by_smi[gpu.uuid]
        assert (gpu.index, gpu.pci, gpu.name, gpu.memory_mib) == (
            index,
            pci.lower()[4:] if pci.startswith("0000") and len(pci) > 12 else pci.lower(),
            name,
            int(memory),
        )
        assert bool(gpu.mig) <= (mig == "Enabled")
        assert gpu.local_cpus <= online
        assert not gpu.path or gpu.path[0].startswith("pci")
        assert gpu.node is None or gpu.node in {node.id for node in machine.nodes}
        row = {"uuid": gpu.uuid, "pci": gpu.pci, "name": gpu.name, "MiB": gpu.memory_mib, "MIG": mig}
        more = {"node": gpu.node, "local CPUs": len(gpu.local_cpus), "path": " ".join(gpu.path)}
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
