"""`dataloader=3` is a number of workers where a group's option stands otherwise."""

from pathlib import Path

import pytest

from launcher.config.composed import resolve
from launcher.config.composition import compose
from launcher.config.multirun import expand_sweep, read_multirun
from launcher.config.schema import DataloaderConfig
from launcher.config.search_path import find_sources
from launcher.errors import UsageError
from tests.seam import Result, run_inside


def configure(*words: str) -> DataloaderConfig:
    return resolve(compose(find_sources(None, None, None), words)).dataloader


@pytest.mark.parametrize(
    ("word", "number"),
    [
        ("dataloader=3", 3),
        ("+dataloader=3", 3),
        ("++dataloader=0", 0),
        ("dataloader=+4", 4),
        ("dataloader=1024", 1024),
    ],
)
def test_a_number_is_that_many_workers(here: Path, word: str, number: int) -> None:
    assert configure(word).num_workers == number


def test_other_keys_go_with_it(here: Path) -> None:
    loader = configure(
        "dataloader=video", "dataloader=5", "dataloader.default=true", "dataloader.worker_gib=2"
    )
    assert (loader.workload, loader.num_workers, loader.default, loader.worker_gib) == ("", 5, True, 2.0)


def test_an_option_of_ones_own_may_begin_as_a_number(here: Path) -> None:
    (here / "conf/dataloader").mkdir(parents=True)
    (here / "conf/dataloader/3d.yaml").write_text("workload: 3d\nnum_workers: 7\n")
    assert (configure("dataloader=3d").num_workers, configure("dataloader=3").num_workers) == (7, 3)


@pytest.mark.parametrize(
    ("word", "numbers"),
    [
        ("dataloader=1,2,4", [1, 2, 4]),
        ("dataloader=choice(1,2)", [1, 2]),
        ("dataloader=range(1,4)", [1, 2, 3]),
        ("dataloader=0, 3", [0, 3]),
    ],
)
def test_numbers_make_a_sweep(here: Path, word: str, numbers: list[int]) -> None:
    jobs = expand_sweep(read_multirun(find_sources(None, None, None), [word, "name=x"]))
    assert [configure(*job).num_workers for job in jobs] == numbers


def test_options_make_a_sweep_as_before(here: Path) -> None:
    jobs = expand_sweep(read_multirun(find_sources(None, None, None), ["dataloader=text,vision"]))
    assert [configure(*job).num_workers for job in jobs] == [2, 4]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("dataloader=2.5", "2.5 is no whole number of workers, and no option (none, text, video, vision)"),
        ("dataloader=1e3", "1e3 is no whole number"),
        ("dataloader=3x", "3x is no whole number"),
        ("dataloader=.5", ".5 is no whole number"),
        ("dataloader=text,3", "has numbers beside text: give numbers alone"),
        ("dataloader=3,", "has numbers beside nothing"),
        ("dataloader=1,2", "add --multirun"),
        ("dataloader=txt", "did you mean text?"),
    ],
)
def test_what_is_no_number_is_told(here: Path, word: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        configure(word)
    assert says in str(caught.value)


@pytest.mark.parametrize("number", ["-1", "1025", "99999999999999999999"])
@pytest.mark.parametrize("verb", [["plan"], ["dry_run=true"]], ids=str)
def test_a_number_that_no_rank_can_have_is_refused(here: Path, verb: list[str], number: str) -> None:
    result: Result = run_inside([*verb, f"dataloader={number}"])
    result.assert_error(2, f"dataloader.num_workers={number}", "at least 0 and at most 1024")
