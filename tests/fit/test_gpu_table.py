"""GPUs by the driver's names and by short ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.fit.gpus import GPU_TYPES, find_gpu
from tests.fuzzing import WORDS, texts

NAMES = [
    # As nvidia-smi and torch.cuda.get_device_name give them, and as people write them.
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H100 PCIe", "h100 pcie"),
    ("NVIDIA H100 NVL", "h100 nvl"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA H200 NVL", "h200 nvl"),
    ("NVIDIA B200", "b200"),
    ("NVIDIA GB200", "gb200"),
    ("NVIDIA GH200 480GB", "gh200"),
    ("NVIDIA GH200 144G HBM3e", "gh200 144g"),
    ("NVIDIA H20", "h20"),
    ("NVIDIA H800", "h800"),
    ("NVIDIA A100-SXM4-40GB", "a100 40gb"),
    ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA A100-PCIE-40GB", "a100 pcie 40gb"),
    ("NVIDIA A100 80GB PCIe", "a100 pcie"),
    ("A100-SXM4-40GB", "a100 40gb"),
    ("NVIDIA A10G", "a10g"),
    ("NVIDIA A10", "a10"),
    ("NVIDIA L40S", "l40s"),
    ("NVIDIA L4", "l4"),
    ("Tesla T4", "t4"),
    ("Tesla V100-SXM2-16GB", "v100 16gb"),
    ("Tesla V100-SXM2-32GB", "v100"),
    ("Tesla V100-PCIE-16GB", "v100 pcie"),
    ("NVIDIA RTX A6000", "rtx a6000"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx 6000 ada"),
    ("NVIDIA GeForce RTX 4090", "rtx 4090"),
    ("AMD Instinct MI300X", "mi300x"),
    ("H100", "h100"),
    ("h100-80gb", "h100"),
    ("H100_SXM5_80GB", "h100"),
    ("A100-40GB", "a100 40gb"),
    ("a100 80gb", "a100"),
    ("A100", "a100"),
    ("rtx4090", "rtx 4090"),
]


@pytest.mark.parametrize(("name", "short"), NAMES)
def test_a_gpu_is_found_by_its_names(name: str, short: str) -> None:
    found = find_gpu(name)
    assert found is not None and found.name == short
    assert found.memory_mib == next(gpu.memory_mib for gpu in GPU_TYPES if gpu.name == short)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA",
        "A1000",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "GRID A100-10C",
        "NVIDIA A100-40C",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "cpu",
        "H1000",
        "XA100",
    ],
)
def test_what_is_not_in_the_table_is_not_guessed(name: str) -> None:
    assert find_gpu(name) is None


def test_peaks_by_what_is_computed_in() -> None:
    old, new = find_gpu("V100"), find_gpu("H100")
    assert old is not None and old.peak_tflops == (("fp32", 15.7), ("fp16", 125))
    assert new is not None and new.peak_tflops == (
        ("fp32", 67),
        ("tf32", 494),
        ("bf16", 989),
        ("fp8", 1979),
    )


def test_a_size_in_the_name_counts() -> None:
    found = find_gpu("NVIDIA A100-SXM-64GB")
    assert found is not None and (found.memory_mib, found.bf16) == (65536, 312)
    assert find_gpu(f"A100 {'9' * 5000}GB") == find_gpu("A100-0GB") == find_gpu("A100")


def test_rows_are_found_by_their_own_names_and_are_plausible() -> None:
    for gpu in GPU_TYPES:
        assert find_gpu(gpu.name.upper().replace(" ", "-")) == gpu
        assert gpu.fp32 <= (gpu.tf32 or gpu.fp32) < gpu.bf16 < (gpu.fp8 or 1e9)
        assert 8 * 1024 <= gpu.memory_mib < 300 * 1024 and gpu.nvlink_domain >= 1 and gpu.source
        assert [gpu.find_precision_peak(name) > 0 for name in WORDS["fit.precision"]] == [True] * 4


@given(st.lists(texts | st.sampled_from([word for name, _ in NAMES for word in name.split()])).map(" ".join))
def test_any_name_is_found_or_not(name: str) -> None:
    found = find_gpu(name)
    assert found is None or found.memory_mib > 0
