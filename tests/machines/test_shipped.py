"""The shipped machines: made of their descriptions, and planned as well as each allows."""

from tempfile import gettempdir
from typing import Any

import pytest

from launcher.plan.model import Limits, Machine, Plan, Request, parse_machine, plan_to_json
from launcher.plan.planner import plan
from tests.plan.lab_machines import score

from .build import NAMES, SHIPPED, build_files, read_description

Data = dict[str, Any]
WANTED = (
    *("dgx_a100", "dgx_h100", "dgx_b200", "gh200", "gb200_nvl4", "oci_mi300x_8"),
    *("aws_p3_16xlarge", "aws_p4d_24xlarge", "aws_p5_48xlarge", "gcp_a3_highgpu_8g"),
    *("azure_ndv4", "azure_ndv5", "azure_ncv4", "cpu_2s"),
)


def load(name: str) -> Machine:
    """A machine as it is shipped."""
    return parse_machine((SHIPPED / f"{name}.json").read_text())


def plan_shipped(name: str) -> Plan:
    """Its plan with as many ranks as it has GPUs, or NUMA nodes."""
    return plan(load(name), Request())


def test_what_is_shipped_is_what_is_described() -> None:
    shipped = {path.name for path in SHIPPED.iterdir()} - {"local.yaml"}
    assert shipped == {f"{name}.{kind}" for name in NAMES for kind in ("json", "yaml")}
    assert set(WANTED) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_files_are_those_that_the_descriptions_give(name: str) -> None:
    for file, text in build_files(name).items():
        assert (SHIPPED / file).read_text() == text, "make them anew: python -m tests.machines"


@pytest.mark.parametrize("name", NAMES)
def test_every_measure_of_the_lab_holds(name: str) -> None:
    data = {"name": name, **read_description(name)}
    result = score.score(data, plan_to_json(plan_shipped(name)))
    assert {measure for measure, pair in result.items() if not score.holds({measure: pair})} == set()


@pytest.mark.parametrize("name", NAMES)
def test_the_devices_are_where_the_description_has_them(name: str) -> None:
    data, machine = read_description(name), load(name)
    gpus = [(gpu.pci, gpu.node, gpu.path, gpu.name) for gpu in machine.gpus]
    assert gpus == [(*place(gpu), data["gpu_model"]) for gpu in data.get("gpus", [])]
    assert {gpu.vendor for gpu in machine.gpus} <= {data.get("gpu_vendor", "nvidia")}
    nics = {nic.name: (nic.pci, nic.node, nic.path) for nic in machine.nics}
    assert nics == {nic["name"]: place(nic) for nic in data.get("nics", [])}


def place(device: Data) -> tuple[str, int | None, tuple[str, ...]]:
    """PCI address, NUMA node and PCI path of a described device."""
    node = device["numa"] if device["numa"] >= 0 else None
    return device["bdf"] or "", node, tuple(device.get("path", ()))


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_says_what_it_is_and_where_from_and_nothing_of_its_making(name: str) -> None:
    machine = load(name)
    assert machine.name and len(machine.source) > 60
    assert (machine.limits, machine.warnings) == (Limits(), ())
    assert {gpu.uuid for gpu in machine.gpus} <= {""}
    text = (SHIPPED / f"{name}.json").read_text() + (SHIPPED / f"{name}.yaml").read_text()
    assert gettempdir() not in text and "fffe:" not in text


WARNED = {
    "a100_slurm_32of112": "GPU",
    "rtx_a6000_6plus2": "local rank 0-5 has 16 usable cores",
    "workstation_1plus4": "local rank 1-4 has 8 usable cores",
}
"""Machines whose plan has a warning, and what it is about."""


@pytest.mark.parametrize("name", NAMES)
def test_only_real_trouble_is_warned_of(name: str) -> None:
    warnings = plan_shipped(name).warnings
    assert bool(warnings) == (name in WARNED), warnings
    assert WARNED.get(name, "") in " ".join(map(str, warnings))


PAIRS = {
    "dgx_a100": "mlx5_0 mlx5_1 mlx5_2 mlx5_3 mlx5_6 mlx5_7 mlx5_8 mlx5_9",
    "dgx_h100": "mlx5_0 mlx5_3 mlx5_4 mlx5_5 mlx5_6 mlx5_9 mlx5_10 mlx5_11",
    "dgx_b200": "mlx5_4 mlx5_7 mlx5_8 mlx5_9 mlx5_10 mlx5_13 mlx5_14 mlx5_15",
    "azure_ndv5": " ".join(f"mlx5_ib{number}" for number in range(8)),
    "azure_ndv4": " ".join(f"mlx5_ib{number}" for number in range(8)),
    "aws_p5_48xlarge": " ".join(f"rdmap{bus}s0" for bus in (79, 96, 113, 130, 147, 164, 181, 198)),
    "aws_p4d_24xlarge": " ".join(f"rdmap{bus}s27 rdmap{bus}s27" for bus in (16, 32, 144, 160)),
    "gb200_nvl4": "mlx5_0 mlx5_1 mlx5_4 mlx5_5",
}
"""Each GPU's NIC, in the order of the GPUs: as the vendors have them behind one switch, or on one socket."""


@pytest.mark.parametrize("name", PAIRS)
def test_each_gpu_has_the_nic_that_its_vendor_gives_it(name: str) -> None:
    assert [rank.nic for rank in plan_shipped(name).ranks] == PAIRS[name].split()
