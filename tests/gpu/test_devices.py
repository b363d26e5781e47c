"""What CUDA shows under each form of CUDA_VISIBLE_DEVICES, against what the launcher makes of it."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from launcher.plan.devices import resolve_visible
from launcher.plan.model import Gpu
from launcher.probe.machine import probe
from tests.gpu.proof import PROGRAMS, Proof, together

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def list_forms(gpus: Sequence[Gpu]) -> dict[str, str | None]:
    first, last = gpus[0], gpus[-1]
    return {
        "unset": None,
        "index": str(last.index),
        "two indices, the second of no GPU": f"0,{len(gpus)}",
        "index of no GPU": str(len(gpus)),
        "index twice": "0,0",
        "index with text behind it": "0gpu",
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
    gpus = probe("/").gpus
    if len(gpus) < 2 or not any(gpu.mig for gpu in gpus):
        proof.record("Not proved here", f"{len(gpus)} GPUs, MIG: {any(gpu.mig for gpu in gpus)}")

    def look(form: tuple[str, str | None]) -> tuple[str, list[str], list[str]]:
        name, value = form
        setting = {} if value is None else {VISIBLE: value}
        command = ["env", *(["-u", VISIBLE] if value is None else []), sys.executable, PROGRAMS, "show"]
        ended = proof.run(name, command, 0, 60, {ORDER: "PCI_BUS_ID", **setting})
        expected = [gpu.uuid for gpu in resolve_visible(tuple(gpus), setting).devices]
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
