"""What CUDA shows under each form of CUDA_VISIBLE_DEVICES, against what the launcher makes of it."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.plan.model import Gpu
from launcher.plan.visible_devices import resolve_visible
from launcher.probe.machine import probe
from tests.gpu.context import NEEDED, PROGRAMS, Context, run_program, together

SHOW = str(PROGRAMS / "show_device.py")
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
Variables = Mapping[str, str]
Shown = dict[str, Any]
"""What SHOW prints."""


def run(context: Context) -> None:
    """Try the forms, then real runs."""
    gpus = () if context.cpu else probe("/").gpus
    if context.cpu:
        context.record.leave_out(f"forms of {VISIBLE}", NEEDED)
    else:
        tell_lacks(context, gpus)
        with context.record.part(f"forms of {VISIBLE}"):
            try_forms(context, gpus)
    together(lambda run: try_run(context, *run), list_runs(gpus))


def tell_lacks(context: Context, gpus: Sequence[Gpu]) -> None:
    """Record what this machine's GPUs cannot show."""
    if len(gpus) < 2:
        context.record.leave_out("the order of several GPUs", f"this machine has {len(gpus)}")
    if not any(gpu.mig for gpu in gpus):
        context.record.leave_out("names of MIG instances", "no GPU has any")


def list_forms(gpus: Sequence[Gpu]) -> dict[str, Variables]:
    """Name the forms: each with the variables that it sets."""
    first, last = gpus[0], gpus[-1]
    values = {
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
    }
    values |= {f"MIG instance {uuid}": uuid for gpu in gpus for uuid in gpu.mig}
    return {"unset": {}, **{name: {VISIBLE: value} for name, value in values.items()}}


def try_forms(context: Context, gpus: Sequence[Gpu]) -> None:
    """Have CUDA count and name its devices under each form, each in a process of its own."""
    together(lambda form: try_form(context, *form, gpus), list_forms(gpus).items())


def try_form(context: Context, name: str, form: Variables, gpus: Sequence[Gpu]) -> None:
    """Compare what CUDA shows a process with what the launcher takes it to show."""
    unset = [] if VISIBLE in form else ["-u", VISIBLE]
    command, environ = ["env", *unset, sys.executable, SHOW], {ORDER: "PCI_BUS_ID", **form}
    with context.record.part(f"{VISIBLE}: {name}"):
        shown = read_shown(run_program(command, context.folder / f"form {name}", 60, environ).demand().out)
        expected = [gpu.uuid for gpu in resolve_visible(tuple(gpus), form).devices]
        found = [name_uuid(device["uuid"], expected) for device in shown["devices"]]
        holds = context.record.check(f"{VISIBLE}: {name}", found == expected, f"{found}, not {expected}")
        context.record.row(
            VISIBLE,
            form=name,
            value=form.get(VISIBLE),
            CUDA_shows=len(found),
            torch_counts=shown["device_count"],
            launch_expects=len(expected),
            same=holds,
        )


def name_uuid(uuid: str, expected: Sequence[str]) -> str:
    """A UUID of torch's as NVML has it: that of a MIG instance, if one is expected."""
    return next((name for name in (f"MIG-{uuid}", uuid) if name in expected), f"GPU-{uuid}")


def list_runs(gpus: Sequence[Gpu]) -> list[tuple[str, Variables]]:
    """The runs: a setting, and the variables that they begin with."""
    runs: list[tuple[str, Variables]] = [(f"devices={value}", {}) for value in ("all", "own", "spread")]
    runs += [("devices=own", {VISIBLE: gpu.uuid[:14]}) for gpu in gpus[-1:]]
    return [*runs, ("devices=all", {ORDER: "FASTEST_FIRST"})]


def try_run(context: Context, setting: str, environ: Variables) -> None:
    """Run a rank under `launch`, and compare what it finds with its plan."""
    name = " ".join([*(f"{name}={value}" for name, value in environ.items()), setting])
    with context.record.part(name):
        ended = context.launch(name, "nproc_per_node=1", setting, "--", SHOW, environ=environ).demand()
        (plan,) = (ended.folder / "run").glob("plan-*.json")
        rank = json.loads(plan.read_text())["ranks"][0]
        shown = read_shown(ended.read_rank())
        if context.cpu:
            none = rank["gpu"] is None and not shown["devices"]
            context.record.check(f"{name}: no GPU, as planned", none, f"{rank['gpu']}, {shown['devices']}")
        else:
            judge_run(context, name, shown, rank["gpu"], environ)


def judge_run(context: Context, name: str, shown: Shown, gpu: Shown, environ: Variables) -> None:
    """Compare what a rank has found with the GPU of its plan."""
    record, found = context.record, f"{shown}; planned {gpu}"
    first: Shown = shown["devices"][0] if shown["devices"] else {"pci": None, "uuid": ""}
    same = first["pci"] == gpu["pci"] and name_uuid(first["uuid"], [gpu["uuid"]]) == gpu["uuid"]
    record.check(f"{name}: the rank's GPU is the plan's", same, found)
    if "own" in name:
        record.check(f"{name}: the rank sees its GPU alone", shown["count"] == 1, found)
    order = environ.get(ORDER, "PCI_BUS_ID")
    record.check(f"{name}: the order is {order}", shown["environ"][ORDER] == order, found)
    record.row("Runs", run=name, devices=shown["count"], **{VISIBLE: shown["environ"][VISIBLE]})


def read_shown(text: str) -> Shown:
    """What SHOW printed."""
    shown: Shown = json.loads(text.strip().splitlines()[-1])
    return shown
