"""What the benchmarks of memory measure: real workers here, and what of the GPU's needs no GPU."""

from pathlib import Path

import pytest
import torch

from tests.benchmarks import fragmentation
from tests.benchmarks.fragmentation import Fill, fill, find_lack, find_largest, format_row
from tests.benchmarks.fragmentation_program import LONGEST, SHORTEST, STRIDE, choose_lengths
from tests.benchmarks.worker_memory import read_workers
from tests.benchmarks.worker_program import WORKERS
from tests.plan.lab_machines import convert, load


@pytest.mark.usefixtures("quick_agent")
def test_workers_that_do_not_collect_are_seen_to_grow(tmp_path: Path) -> None:
    """About 80 MB in 1,000 samples each."""
    collected = read_workers(tmp_path, "gc=default", "--samples=1000")
    kept = read_workers(tmp_path, "gc=default", "--samples=1000", "--disable-gc")
    assert len(collected) == len(kept) == WORKERS
    assert min(kept) - max(collected) > 40


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 17, 64, 100])
def test_the_largest_batch_is_found(limit: int) -> None:
    asked: list[int] = []

    def fits(batch: int) -> bool:
        asked.append(batch)
        return batch <= limit

    assert find_largest(fits) == limit
    assert len(asked) == len(set(asked)) <= 15


def test_lengths_vary_and_are_the_same_each_time() -> None:
    lengths = choose_lengths(60)
    assert lengths == choose_lengths(60)
    assert len(set(lengths)) > 10
    assert min(lengths) >= SHORTEST
    assert max(lengths) <= LONGEST
    assert not any(length % STRIDE for length in lengths)


def test_a_row_says_what_part_of_the_reserved_memory_is_unused() -> None:
    filled = Fill(fits=True, allocated_mib=750, reserved_mib=1000)
    assert format_row("default", 40, filled) == "| default | 40 | 1000 | 750 | 25% |"
    assert format_row("default", 0, None) == "| default | 0 | | | |"


def test_the_program_trains_and_reports(tmp_path: Path) -> None:
    filled = fill(tmp_path, "expandable", 1, "--device=cpu", "--steps=1")
    assert filled == Fill(fits=True, allocated_mib=0, reserved_mib=0)


def test_without_a_gpu_nothing_is_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fragmentation, "probe", lambda _: convert(load("cpu-only-2s")))
    fragmentation.bench_fragmentation(tmp_path, 1)
    assert capsys.readouterr().out.strip().endswith("no NVIDIA GPU: not measured")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch finds a GPU")
def test_a_torch_that_finds_no_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragmentation, "probe", lambda _: convert(load("dgx-a100")))
    assert find_lack() == f"torch {torch.__version__} finds no CUDA"


@pytest.mark.gpu
@pytest.mark.skipif(bool(find_lack()), reason="no NVIDIA GPU that the probe and torch see")
def test_on_a_gpu_a_small_batch_fits_and_a_large_one_does_not(tmp_path: Path) -> None:
    small = fill(tmp_path, "expandable", 1, "--steps=5", "--cap-gib=4")
    assert small.fits
    assert 0 < small.allocated_mib <= small.reserved_mib <= 4096
    assert not fill(tmp_path, "default", 4096, "--steps=5", "--cap-gib=4").fits
