"""CUDA_VISIBLE_DEVICES in every legal form, and in illegal ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.model import Gpu
from launcher.plan.visible_devices import Visible, resolve_visible

GPUS = (
    Gpu(0, "GPU-aaaa1111-00", "0000:07:00.0", 0),
    Gpu(1, "GPU-aaaa2222-00", "0000:0f:00.0", 0),
    Gpu(2, "GPU-bbbb3333-00", "10000:00:04.0", 1),
    Gpu(3, "GPU-cccc4444-00", "0000:47:00.1", 1, mig=("MIG-d1", "MIG-d2")),
)
MIG = ["MIG-d1", "MIG-d2"]
WHOLE = [gpu.uuid for gpu in GPUS[:3]]


def resolve(value: str | None, gpus: tuple[Gpu, ...] = GPUS) -> Visible:
    return resolve_visible(gpus, {} if value is None else {"CUDA_VISIBLE_DEVICES": value})


def see(value: str | None) -> list[str]:
    return [device.uuid for device in resolve(value).devices]


LEGAL = {
    "0": WHOLE[:1],
    "2,0,1": [WHOLE[2], WHOLE[0], WHOLE[1]],
    " 1 , 0": [WHOLE[1], WHOLE[0]],
    "+1,00": [WHOLE[1], WHOLE[0]],
    "3": MIG[:1],
    "GPU-aaaa2222-00": WHOLE[1:2],
    "GPU-bbb,GPU-aaaa1": [WHOLE[2], WHOLE[0]],
    "GPU-c": MIG[:1],
    "MIG-d2,MIG-d1": MIG[::-1],
    "MIG-GPU-cccc4444-00/1/0,MIG-GPU-cccc4444-00/2/0": ["MIG-GPU-cccc4444-00/1/0", "MIG-GPU-cccc4444-00/2/0"],
    "": [],
    " ": [],
    "-1": [],
    "NoDevFiles": [],
}


@pytest.mark.parametrize("value", LEGAL)
def test_legal_forms(value: str) -> None:
    assert see(value) == LEGAL[value]
    assert resolve(value).warnings == ()


LOOSE = {
    "1,-0": [WHOLE[1], WHOLE[0]],
    "0x1,1": [WHOLE[0], WHOLE[1]],
    "1gpu,2": WHOLE[1:],
    "0-2": WHOLE[:1],
    "1;2": WHOLE[1:2],
}


@pytest.mark.parametrize("value", LOOSE)
def test_numbers_with_something_behind_them_are_told(value: str) -> None:
    assert see(value) == LOOSE[value]
    seen = ",".join(str(WHOLE.index(uuid)) for uuid in LOOSE[value])
    (warning,) = resolve(value).warnings
    assert value in warning and f"the job sees GPU {seen}: give plain numbers" in warning


ILLEGAL = {
    "0,7,1": (WHOLE[:1], "'7'"),
    "0,-1,1": (WHOLE[:1], "'-1'"),
    "0,9,0": (WHOLE[:1], "'9'"),
    "0,-1,0": (WHOLE[:1], "'-1'"),
    "-2": ([], "'-2'"),
    "+": ([], "'+'"),
    "0,,1": (WHOLE[:1], "''"),
    "x": ([], "'x'"),
    "1,x,0": (WHOLE[1:2], "'x'"),
    "GPU-aaaa": ([], "'GPU-aaaa'"),
    "GPU-b,0": (WHOLE[2:], "'0'"),
    "0,GPU-b": (WHOLE[:1], "'GPU-b'"),
    "MIG-d": ([], "'MIG-d'"),
    "MIG-d1,MIG-x": (MIG[:1], "'MIG-x'"),
    "0,0": ([], "second time"),
    "0,1,00": ([], "second time"),
    "GPU-b,GPU-bbbb3333-00": ([], "second time"),
    "9" * 5000: ([], "names no single device"),
    "²": ([], "'²'"),
}


@pytest.mark.parametrize("value", ILLEGAL)
def test_illegal_forms_warn_and_end_the_list_as_cuda_does(value: str) -> None:
    expected, reason = ILLEGAL[value]
    warnings = resolve(value).warnings
    assert see(value) == expected
    assert len(warnings) == 1
    assert reason in warnings[0]


def test_unset_shows_all_with_mig_instances_in_place_of_their_gpu() -> None:
    assert see(None) == WHOLE + MIG


def test_an_instance_has_its_parents_place() -> None:
    device = resolve("MIG-d2").devices[0]
    assert (device.index, device.pci, device.node, device.mig) == (3, "0000:47:00.1", 1, ())


def test_the_order_of_the_list_of_gpus_does_not_count() -> None:
    assert resolve("1", GPUS[::-1]) == resolve("1")
    assert resolve(None, GPUS[::-1]) == resolve(None)


def test_each_device_is_shown_alone_by_its_uuid_else_its_number() -> None:
    assert resolve("MIG-d2").gpu_variables == (("CUDA_VISIBLE_DEVICES", "MIG-d2"),)
    nameless = (Gpu(0, "", "0000:07:00.0", 0), Gpu(1, "", "0000:0f:00.0", 0))
    assert resolve("1", nameless).gpu_variables == (("CUDA_VISIBLE_DEVICES", "1"),)


def test_an_amd_gpu_beside_nvidias_is_for_the_screen() -> None:
    screen = Gpu(4, "", "0000:c0:00.0", 0, vendor="amd")
    assert resolve(None, (*GPUS, screen)).devices == resolve(None).devices
    assert resolve("4", (*GPUS, screen)).devices == ()


@given(st.lists(st.sampled_from(["0", "1", "2", "-1", "", "x", "1x", "+0", "-0", " 2"]), max_size=5))
def test_indices_are_read_as_torch_reads_them(parts: list[str]) -> None:
    import torch.cuda

    value = ",".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", value)
        indices = [int(str(index)) for index in torch.cuda._parse_visible_devices()]
    assert see(value) == [WHOLE[index] for index in indices]
