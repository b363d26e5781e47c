"""The user's variables: which GPUs a job sees, NVIDIA's and AMD's, and the policy of garbage collection."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.inprocess.launch_inprocess.garbage_collection import parse_policy
from launcher.plan.devices import Visible, resolve_visible
from launcher.plan.model import GC_POLICIES, GcConfig, Gpu
from launcher.plan.variables import find_gc_fault, render_gc

CASES = tomllib.loads(Path(__file__).with_name("devices.toml").read_text())
CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
NVIDIA = (
    Gpu(0, "GPU-aaaa1111-00", "0000:07:00.0", 0),
    Gpu(1, "GPU-aaaa2222-00", "0000:0f:00.0", 0),
    Gpu(2, "GPU-bbbb3333-00", "10000:00:04.0", 1),
    Gpu(3, "GPU-cccc4444-00", "0000:47:00.1", 1, mig=("MIG-d1", "MIG-d2")),
)
AMD = tuple(
    Gpu(at, uuid, f"0000:{at}3:00.0", at // 2, vendor="amd")
    for at, uuid in enumerate(("GPU-1111111111111111", "GPU-1111aaaa22222222", "GPU-bbbb333333333333", ""))
)


def check_warnings(found: Visible, parts: list[str]) -> None:
    assert len(found.warnings) == len(parts), found.warnings
    assert all(part in str(warning) for part, warning in zip(parts, found.warnings, strict=True))
    assert all(warning.fix for warning in found.warnings)


@pytest.mark.parametrize(("value", "uuids", "warned"), [(*row[:2], row[2:]) for row in CASES["cuda"]])
def test_cuda(value: str, uuids: list[str], warned: list[str]) -> None:
    found = resolve_visible(NVIDIA, {CUDA: value})
    assert [gpu.uuid for gpu in found.devices] == uuids
    assert found == resolve_visible(NVIDIA[::-1], {CUDA: value})
    assert found.gpu_variables == tuple((CUDA, uuid) for uuid in uuids)
    check_warnings(found, warned)


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
    found = resolve_visible(AMD, environ)
    assert [gpu.index for gpu in found.devices] == indices
    assert {name for name, _ in found.gpu_variables} <= {HIP}
    check_warnings(found, warned)


def test_unset_shows_all_with_mig_instances_in_place_of_their_gpu() -> None:
    found = resolve_visible(NVIDIA, {}).devices
    assert [gpu.uuid for gpu in found] == [*(gpu.uuid for gpu in NVIDIA[:3]), "MIG-d1", "MIG-d2"]
    assert (found[4].index, found[4].pci, found[4].node, found[4].mig) == (3, "0000:47:00.1", 1, ())


def test_each_device_is_shown_alone_by_its_number_without_uuids() -> None:
    nameless = (Gpu(0, "", "0000:07:00.0", 0), Gpu(1, "", "0000:0f:00.0", 0))
    assert resolve_visible(nameless, {CUDA: "1"}).gpu_variables == ((CUDA, "1"),)
    shown = resolve_visible(AMD, {ROCR: "3,2,1", CUDA: "2,0"})
    assert shown.gpu_variables == ((HIP, "2"), (HIP, "0")), "numbers are within what ROCR shows"


def test_an_amd_gpu_beside_nvidias_is_for_the_screen() -> None:
    both = (*NVIDIA, Gpu(4, "", "0000:c0:00.0", 0, vendor="amd"))
    assert resolve_visible(both, {}).devices == resolve_visible(NVIDIA, {}).devices
    assert resolve_visible(both, {CUDA: "4"}).devices == ()


@given(st.lists(st.sampled_from(["0", "1", "2", "-1", "", "x", "1x", "+0", "-0", " 2"]), max_size=5))
def test_numbers_are_read_as_torch_reads_them(parts: list[str]) -> None:
    import torch.cuda

    value = ",".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CUDA, value)
        indices: list[Any] = torch.cuda._parse_visible_devices()
    assert [gpu.index for gpu in resolve_visible(NVIDIA, {CUDA: value}).devices] == list(map(int, indices))


def test_the_policy_of_garbage_collection_is_read_in_the_rank_as_the_plan_writes_it() -> None:
    for name, used in GC_POLICIES.items():
        for log in (False, True):
            text = render_gc(GcConfig(name, 7, 8, log))
            assert find_gc_fault(text) == ""
            expected = (name, 7 if "warmup" in used else 30, 8 if "every" in used else 50, log)
            assert parse_policy(text) == expected
            assert text.count(",") == len(used) + log
    faults = ["", "synchronised", "frozen,warmup=-1", "disabled,evry=5", "disabled,log=1", "disabled,"]
    faults += [f"synchronized,every={value}" for value in ("abc", "", "٣", "1000000000")]
    for text in faults:
        assert find_gc_fault(text)
        with pytest.raises(ValueError, match=r"no policy|option|neither"):
            parse_policy(text)
