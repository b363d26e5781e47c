"""The snapshots and options of the shipped machines, made of their descriptions."""

import json
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

from launcher.plan.model import Gpu, Limits, Machine, Nic, machine_to_json
from launcher.probe.machine import probe
from tests.probe.machine_trees import short_lived

from .tree import Data, write_tree

HERE = Path(__file__).parent
SHIPPED = HERE.parents[1] / "conf" / "machine"
NAMES = sorted(path.stem for path in HERE.glob("*.json"))


def read_description(name: str) -> Data:
    """The description of a shipped machine."""
    data: Data = json.loads((HERE / f"{name}.json").read_text())
    return data


def build_machine(data: Data) -> Machine:
    """Probe the tree of a description, and set what a tree cannot show or only stands in for."""
    with short_lived() as folder:
        write_tree(data, folder)
        found = probe(folder)
    return replace(
        found,
        gpus=tuple(finish_gpu(gpu, data) for gpu in found.gpus),
        nics=tuple(finish_nic(nic, data) for nic in found.nics),
        limits=Limits(),
        name=data["product"],
        source=" ".join(data["source"]),
    )


def finish_gpu(gpu: Gpu, data: Data) -> Gpu:
    """A GPU without stand-ins: no machine of the kind has the same UUIDs."""
    known = next(entry for entry in data["gpus"] if entry["bdf"] == gpu.pci)
    path = gpu.path if "path" in known else ()
    return replace(gpu, uuid="", name=data["gpu_model"], path=path, memory_mib=data.get("gpu_memory_mib", 0))


def finish_nic(nic: Nic, data: Data) -> Nic:
    """A NIC without stand-ins."""
    known = next(entry for entry in data["nics"] if entry["name"] == nic.name)
    link_layer, rate = data["nic_link"]
    return replace(
        nic,
        pci=known["bdf"] or "",
        path=nic.path if "path" in known else (),
        link_layer=known.get("link_layer", link_layer),
        rate_gbps=known.get("rate_gbps", rate),
    )


def format_snapshot(machine: Machine) -> str:
    """A snapshot with a line for each part, so that a change shows as one."""
    lines = []
    for key, value in machine_to_json(machine).items():
        if isinstance(value, list) and value:
            items = ",\n".join(f"  {json.dumps(item)}" for item in value)
            lines.append(f" {json.dumps(key)}: [\n{items}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def format_option(name: str, data: Data) -> str:
    """The configuration that chooses a snapshot: `machine=NAME`."""
    comments = [line for text in (data["product"], *data["source"]) for line in wrap(text, 106)]
    return "".join(f"# {line}\n" for line in comments) + f"snapshot: {name}.json\n"


def build_files(name: str) -> dict[str, str]:
    """The shipped files of a machine, by their names in conf/machine/."""
    data = read_description(name)
    machine = build_machine(data)
    return {f"{name}.json": format_snapshot(machine), f"{name}.yaml": format_option(name, data)}
