"""ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES on a machine with AMD's GPUs."""

from dataclasses import replace

import pytest

from launcher.plan.model import Gpu, Plan, Request
from launcher.plan.planner import plan
from launcher.plan.visible_devices import Visible, resolve_visible

from .lab_machines import convert, describe

UUIDS = ("GPU-1111111111111111", "GPU-1111aaaa22222222", "GPU-bbbb333333333333", "")
GPUS = tuple(Gpu(at, uuid, f"0000:{at}3:00.0", at // 2, vendor="amd") for at, uuid in enumerate(UUIDS))


def resolve(**environ: str) -> Visible:
    names = {"rocr": "ROCR_VISIBLE_DEVICES", "hip": "HIP_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
    return resolve_visible(GPUS, {names[name]: value for name, value in environ.items()})


def see(**environ: str) -> list[int]:
    return [gpu.index for gpu in resolve(**environ).devices]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("0x1,03", [1, 3]),
        ("+2", [2]),
        ("GPU-bbbb", [2]),
        ("gpu-1111AAAA,0", [1, 0]),
        ("GPU-1111111111111111,3", [0, 3]),
        ("", []),
        ("0,", [0]),
    ],
)
def test_rocr_takes_indices_and_beginnings_of_uuids(value: str, expected: list[int]) -> None:
    assert (see(rocr=value), resolve(rocr=value).warnings) == (expected, ())


@pytest.mark.parametrize(
    ("value", "expected", "entry"),
    [
        ("1,7,0", [1], "'7'"),
        ("1,1,0", [1], "'1'"),
        ("2,GPU-bbbb,0", [2], "'GPU-bbbb'"),
        ("GPU-1111,0", [], "'GPU-1111'"),
        ("GPU-", [], "'GPU-'"),
        ("GPU-bbbb3333333333330", [], "'GPU-bbbb3333333333330'"),
        ("0,,1", [0], "''"),
        ("0,-1,1", [0], "'-1'"),
        ("1x", [], "'1x'"),
        ("0b1", [], "'0b1'"),
        ("09", [], "'09'"),
        ("9" * 5000, [], "names no single device"),
        ("²", [], "'²'"),
    ],
)
def test_rocr_ends_at_an_invalid_or_repeated_entry(value: str, expected: list[int], entry: str) -> None:
    found = resolve(rocr=value)
    assert see(rocr=value) == expected
    assert len(found.warnings) == 1
    assert entry in found.warnings[0] and "correct or unset" in found.warnings[0]


def test_rocr_reads_as_many_entries_as_there_are_gpus() -> None:
    assert see(rocr="0,1,2,3,x") == [0, 1, 2, 3]
    assert resolve(rocr="0,1,2,3,x").warnings == ()


@pytest.mark.parametrize("name", ["hip", "cuda"])
@pytest.mark.parametrize(
    ("value", "expected", "part"),
    [
        ("1,0", [1, 0], None),
        ("GPU-bbbb,0", [2, 0], None),
        ("GPU-1111,2", [0, 2], None),
        ("", [0, 1, 2, 3], None),
        ("1,", [1], None),
        ("-1", [], None),
        ("0,-1,1", [0], "'-1'"),
        ("0, 1", [0], "' 1'"),
        ("00", [], "'00'"),
        ("9", [], "'9'"),
        ("1,0,1", [1, 0], "torch counts no device"),
    ],
)
def test_hip_takes_plain_indices_and_parts_of_uuids(
    name: str, value: str, expected: list[int], part: str | None
) -> None:
    warnings = resolve(**{name: value}).warnings
    assert see(**{name: value}) == expected
    assert [part in warning for warning in warnings if part] == [True] * (part is not None)
    assert len(warnings) == (part is not None)


def test_hip_goes_before_cuda_unless_it_is_empty() -> None:
    assert see(hip="2", cuda="1") == [2]
    assert see(hip="", cuda="1") == [1]


def test_hip_numbers_what_rocr_shows() -> None:
    assert see(rocr="3,2,1", hip="2,0") == [1, 3]
    assert see(rocr="2", hip="2") == []
    assert see(rocr="", hip="0") == []
    assert see(rocr="2,0", cuda="1") == [0]


def test_each_device_is_shown_alone_by_its_number_within_what_rocr_shows() -> None:
    assert resolve(rocr="3,2,1", cuda="2,0").gpu_variables == (
        ("HIP_VISIBLE_DEVICES", "2"),
        ("HIP_VISIBLE_DEVICES", "0"),
    )


def make_plan(devices: str, **environ: str) -> Plan:
    machine = convert(describe(["0-7", "8-15"], [0, 0, 1, 1]))
    amd = tuple(replace(gpu, vendor="amd") for gpu in machine.gpus)
    return plan(replace(machine, gpus=amd), Request(devices=devices, environ=tuple(environ.items())))


def test_ranks_follow_their_amd_gpus() -> None:
    made = make_plan("all", ROCR_VISIBLE_DEVICES="3,0", HIP_VISIBLE_DEVICES="1,0")
    assert [(rank.gpu.index, min(rank.cpus)) for rank in made.ranks if rank.gpu] == [(0, 0), (3, 8)]
    assert [dict(rank.env).keys() & {"CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES"} for rank in made.ranks] == [
        set(),
        set(),
    ]
    assert "ROCR_VISIBLE_DEVICES=3,0 kept, set by the user" in made.ranks[0].notes


def test_own_devices_replace_hips_variable_and_leave_rocrs() -> None:
    made = make_plan("own", ROCR_VISIBLE_DEVICES="3,0", HIP_VISIBLE_DEVICES="1,0")
    assert [dict(rank.env)["HIP_VISIBLE_DEVICES"] for rank in made.ranks] == ["1", "0"]
    assert all("CUDA_VISIBLE_DEVICES" not in dict(rank.env) for rank in made.ranks)
    kept = [note for note in made.ranks[0].notes if "kept" in note]
    assert kept == ["ROCR_VISIBLE_DEVICES=3,0 kept, set by the user"]
