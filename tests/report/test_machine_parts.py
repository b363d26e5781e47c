"""The parts that tree and picture are made of: sizes, lists, distances, switches."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cpulist import parse_cpulist
from launcher.plan.model import Gpu, Nic, NumaNode
from launcher.report.machine_parts import Switch, build_parts, describe_gpu, describe_nic, group_devices
from launcher.report.machine_tree import describe_distances
from launcher.report.rank_colours import PALETTE, find_ink, lighten, name_ranks
from launcher.text import clean_text, format_size, shorten_cpulist
from tests.report import full_machines


@pytest.mark.parametrize(
    ("kib", "text"),
    [
        (0, "0 KiB"),
        (512, "512 KiB"),
        (32768, "32 MiB"),
        (1023 << 20, "0.999 TiB"),
        (3 << 29, "1.5 TiB"),
        (395_812_736, "377 GiB"),
        (1000 << 20, "0.977 TiB"),
        (1 << 61, "2.1e+06 PiB"),
    ],
)
def test_sizes(kib: int, text: str) -> None:
    assert format_size(kib) == text


def test_a_list_of_every_second_cpu_is_short() -> None:
    assert shorten_cpulist(range(0, 112, 2)) == "0-110:1/2"
    assert shorten_cpulist(range(0, 8, 2)) == "0,2,4,6"


@given(st.sets(st.integers(0, 300)))
def test_a_short_list_means_the_same(numbers: set[int]) -> None:
    assert parse_cpulist(shorten_cpulist(numbers)) == numbers


def test_names_from_firmware_are_one_clean_line() -> None:
    assert clean_text(" a\n b\x1b[31m\x07 \udcff") == "a b?[31m? ?"
    assert len(clean_text("x" * 300)) == 80


def make_nodes(*rows: tuple[int, ...]) -> list[NumaNode]:
    return [NumaNode(at, 1, normal=True, distances=tuple(enumerate(row))) for at, row in enumerate(rows)]


def test_distances_of_one_node_are_not_shown() -> None:
    assert describe_distances(make_nodes((10,))) == []


def test_equal_distances_are_a_sentence() -> None:
    assert describe_distances(make_nodes((10, 32), (32, 10))) == ["10 within a NUMA node, 32 between nodes"]


def test_a_ring_of_nodes_is_shown_whole() -> None:
    ring = make_nodes((10, 16, 22, 17), (16, 10, 17, 22), (22, 17, 10, 16), (17, 22, 16, 10))
    assert describe_distances(ring) == [
        "nodes   0   1   2   3",
        "    0  10  16  22  17",
        "    1  16  10  17  22",
        "    2  22  17  10  16",
        "    3  17  22  16  10",
    ]


def test_distances_that_differ_by_direction_are_not_merged() -> None:
    assert len(describe_distances(make_nodes((10, 20), (30, 10)))) == 3


def test_a_large_table_without_order_is_a_sentence() -> None:
    rows = [tuple(10 if a == b else 11 + (a * 7 + b * 7 + a * b) % 97 for b in range(20)) for a in range(20)]
    (line,) = describe_distances(make_nodes(*rows))
    assert line.endswith("between nodes, without order: format=json has them all")


def make_gpu(pci: str, *path: str) -> Gpu:
    return Gpu(0, pci, pci, 0, path=path)


def make_nic(pci: str, *path: str) -> Nic:
    return Nic("mlx5_0", pci, 0, path)


def test_what_shares_a_root_port_is_behind_its_last_common_bridge() -> None:
    up = ("pci0000:15", "0000:15:01.0", "0000:16:00.0")
    gpu, nic = make_gpu("0000:19:00.0", *up, "0000:17:00.0"), make_nic("0000:18:00.0", *up, "0000:17:01.0")
    other = make_gpu("0000:2a:00.0", "pci0000:15", "0000:15:02.0")
    assert group_devices([gpu, nic, other]) == (Switch("0000:16:00.0", (gpu, nic)), other)


def test_switches_below_a_switch_are_nested() -> None:
    top = ("pci0000:00", "0000:00:01.0")
    first = [make_gpu(f"0000:{at}:00.0", *top, "0000:02:00.0", f"0000:03:0{at}.0") for at in (4, 5)]
    second = [make_gpu(f"0000:{at}:00.0", *top, "0000:02:01.0", f"0000:06:0{at}.0") for at in (7, 8)]
    assert group_devices([*first, *second]) == (
        Switch("0000:00:01.0", (Switch("0000:02:00.0", tuple(first)), Switch("0000:02:01.0", tuple(second)))),
    )


@pytest.mark.parametrize("path", [(), ("pci0000:00",)])
def test_a_host_bridge_or_an_unknown_path_is_no_switch(path: tuple[str, ...]) -> None:
    gpus = (make_gpu("0000:01:00.0", *path), make_gpu("0000:02:00.0", *path))
    assert group_devices(gpus) == gpus


def test_two_ports_of_a_card_are_no_switch() -> None:
    path = ("pci0000:15", "0000:15:01.0")
    ports = (make_nic("0000:19:00.0", *path), make_nic("0000:19:00.1", *path))
    assert group_devices(ports) == ports


def test_what_is_known_of_devices() -> None:
    assert describe_gpu(Gpu(0, "", "", None, vendor="amd")) == ("AMD GPU",)
    assert describe_gpu(Gpu(0, "", "", None, name="X", memory_mib=81920, mig=("MIG-1", "MIG-2"))) == (
        "X",
        "80 GiB",
        "2 MIG instances",
    )
    assert describe_nic(Nic("a", "", None)) == ()
    assert describe_nic(Nic("a", "", None, link_layer="Ethernet", rate_gbps=2.5)) == (
        "Ethernet 2.5 Gb/s",
        "active",
    )
    assert describe_nic(Nic("a", "", None, active=False)) == ("down",)


def test_every_pu_and_device_is_in_the_tree_once() -> None:
    machine = full_machines.odd()
    root = build_parts(machine, {})
    assert [part.pus for part in root.parts if part.pus] == [
        tuple(cpu.id for cpu in machine.cpus if cpu.package == package) for package in (0, 1)
    ]
    devices = [device for package in root.parts for node in package.parts for device in node.devices]
    assert {*devices, *root.devices} == {*machine.gpus, *machine.nics}
    assert len(devices) + len(root.devices) == len(machine.gpus) + len(machine.nics)


def test_devices_next_to_a_node_without_cpus_stand_with_it() -> None:
    machine = full_machines.odd()
    near = replace(machine, gpus=(replace(machine.gpus[0], node=2),), nics=())
    (node,) = (part for part in build_parts(near, {}).parts if part.kind == "NUMANode")
    assert (node.numbers, node.devices) == ((2,), near.gpus)


def test_a_gpu_on_a_node_that_is_not_there_stands_under_the_machine() -> None:
    machine = full_machines.hybrid()
    lost = replace(machine, gpus=(replace(machine.gpus[0], node=7),))
    assert build_parts(lost, {}).devices == lost.gpus


def test_short_names_of_ranks() -> None:
    assert [name_ranks("R", ranks) for ranks in ({3}, {0, 1, 2}, {0, 8, 16, 24})] == ["R3", "R0-2", "R0+3"]


def test_text_is_readable_on_every_colour() -> None:
    """At least 3:1 by WCAG 2's relative luminance, as for large text and graphics."""
    for fill in (*PALETTE, *map(lighten, PALETTE)):
        light, dark = sorted((find_luminance(fill), find_luminance(find_ink(fill))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, fill


def find_luminance(colour: str) -> float:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
