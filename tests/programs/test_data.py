"""The text and its order."""

import pickle
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.programs.corpus import find_text
from launcher.programs.data import Schedule, Split, Windows, choose_index, make_loader, permute, split_windows
from launcher.programs.options import OptionError


@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_a_permutation_takes_each_index_once(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_epochs_and_seeds_differ_and_each_epoch_is_whole() -> None:
    epochs = [[choose_index(epoch * 50 + i, 50, seed=3) for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != [choose_index(i, 50, seed=4) for i in range(50)]
    assert epochs[0] != sorted(epochs[0])


def consume(
    world_size: int, accumulation: int, batch_size: int, steps: int, first: int = 0
) -> list[list[int]]:
    """Give what all ranks together take in each optimizer step, sorted."""
    split = Split(windows=70, stride=7)
    ranks = [
        list(Schedule(split, 5, first, steps * accumulation, batch_size, rank, world_size))
        for rank in range(world_size)
    ]
    taken = [sorted(chain(*(rank[m] for rank in ranks))) for m in range(steps * accumulation)]
    return [sorted(chain(*taken[s * accumulation : (s + 1) * accumulation])) for s in range(steps)]


@pytest.mark.parametrize(
    ("world_size", "accumulation", "batch_size"), [(1, 4, 2), (2, 2, 2), (4, 1, 2), (8, 1, 1)]
)
def test_steps_do_not_depend_on_the_world_size(world_size: int, accumulation: int, batch_size: int) -> None:
    assert consume(world_size, accumulation, batch_size, steps=12) == consume(1, 1, 8, steps=12)


def test_a_resumed_schedule_goes_on_where_it_was() -> None:
    assert consume(2, 1, 4, steps=12)[7:] == consume(2, 1, 4, steps=5, first=7 * 8)


@given(windows=st.integers(1, 500), stride=st.just(0) | st.integers(2, 40))
@settings(max_examples=50)
def test_a_split_shares_all_windows_out(windows: int, stride: int) -> None:
    split = Split(windows, stride)
    train = [split.train_window(index) for index in range(split.training)]
    held_out = [split.validation_window(index) for index in range(split.validation)]
    assert sorted(train + held_out) == list(range(windows))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(101)))
    return path


def test_windows_overlap_by_the_byte_to_predict(text: Path) -> None:
    windows = Windows(text, 10)
    assert len(windows) == 10
    assert windows[0].tolist() == list(range(11))
    assert windows[9].tolist() == list(range(90, 101))
    assert windows[9].dtype == torch.uint8
    assert len(pickle.dumps(windows)) < 1000
    assert pickle.loads(pickle.dumps(windows))[1].tolist() == list(range(10, 21))


def test_loaders_give_the_schedule_also_through_workers(text: Path) -> None:
    windows = Windows(text, 10)
    schedule = Schedule(split_windows(windows, 0.2), 1, 0, 6, 2, 0, 1)
    plain = [batch.tolist() for batch in make_loader(windows, schedule, 0, pin=False)]
    worked = [batch.tolist() for batch in make_loader(windows, schedule, 1, pin=False)]
    assert plain == worked == [[windows[i].tolist() for i in indices] for indices in schedule]
    assert len(plain) == 6


@pytest.mark.parametrize(("size", "fraction"), [(10, 0.0), (40, 0.1), (0, 0.01)])
def test_a_text_too_short(tmp_path: Path, size: int, fraction: float) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(size))
    with pytest.raises(OptionError, match=f"has {size} bytes"):
        split_windows(Windows(path, 10), fraction)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"


def test_pythons_library_is_gathered_once(cache: Path) -> None:
    found = find_text(None)
    assert cache in found.parents
    assert found.stat().st_size > 1_000_000
    content = found.read_bytes()
    assert b"class ArgumentParser" in content
    assert b"class TestOptionalsSingleDash(" not in content  # of the library's own tests
    first = found.stat().st_ino
    assert find_text(None) == found
    assert found.stat().st_ino == first
    found.unlink()
    assert find_text(None).read_bytes() == content
    assert list(found.parent.iterdir()) == [found]


def test_a_directory_is_gathered_in_order_and_anew_when_it_changes(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    (folder / "b").mkdir(parents=True)
    (folder / "z").write_text("last ")
    (folder / "a").write_text("first ")
    (folder / "b" / "c").write_text("below ")
    for number in reversed(range(9)):
        (folder / f"d{number}").mkdir()
        (folder / f"d{number}" / "file").write_text(f"{number} ")
    found = find_text(str(folder))
    assert found.read_text() == "first last below 0 1 2 3 4 5 6 7 8 "
    (folder / "a").write_text("changed ")
    assert find_text(str(folder)).read_text() == "changed last below 0 1 2 3 4 5 6 7 8 "
    assert found.read_text() == "first last below 0 1 2 3 4 5 6 7 8 "


def test_a_cache_that_cannot_be_written_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("text")
    assert tmp_path / "temporary" in find_text(str(tmp_path / "folder")).parents


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_no_text(cache: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match=r"--data\.path"):
        find_text(str(tmp_path / path))
