"""Typed values from JSON, whatever a file holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.codec import KEY, DecodeError, convert, dump, load
from tests.fuzzing import scalars, texts


@dataclass(frozen=True, slots=True)
class Inner:
    number: int
    share: float = 0.5
    most: float | None = None
    source: str = field(default="", metadata={KEY: "from"})


@dataclass(frozen=True, slots=True)
class Outer:
    name: str
    inner: Inner | None
    pairs: tuple[tuple[str, int], ...] = ()
    inners: tuple[Inner, ...] = ()
    cpus: frozenset[int] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict)
    ready: bool = False
    paths: list[str] = field(default_factory=list)
    anything: Any = None


WHOLE = {
    "name": "a",
    "inner": {"number": 1, "share": 2, "from": "b"},
    "pairs": [["a", 1], ["b", 2]],
    "inners": [{"number": 3}],
    "cpus": "0-2,7",
    "env": {"A": "1"},
    "ready": True,
    "paths": ["x"],
    "anything": [{}],
    "of a later version": 1,
}


def test_all_that_there_is() -> None:
    assert convert(Outer, WHOLE) == Outer(
        "a",
        Inner(1, 2.0, None, "b"),
        (("a", 1), ("b", 2)),
        (Inner(3),),
        frozenset({0, 1, 2, 7}),
        {"A": "1"},
        True,
        ["x"],
        [{}],
    )
    assert convert(Outer, {"name": "a", "inner": None, "pairs": {"a": 1}}) == Outer("a", None, (("a", 1),))
    assert convert(tuple[int, bool], [1, True]) == (1, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "name is of type int, not str"),
        ({"inner": {}}, "inner.number is missing"),
        ({"inner": {"number": True}}, "inner.number is of type bool, not int"),
        ({"inner": {"number": 1.0}}, "inner.number is of type float, not int"),
        ({"inner": {"number": -1}}, "inner.number is -1, less than 0"),
        ({"inner": {"number": 1, "share": inf}}, "inner.share is too large"),
        ({"inner": {"number": 1, "share": 10**400}}, "inner.share is too large"),
        ({"inner": {"number": 10**400}}, "inner.number is too large"),
        ({"inner": {"number": 1, "most": -inf}}, "inner.most is too large"),
        ({"inner": {"number": 1, "most": nan}}, "inner.most is too large"),
        ({"inner": {"number": 1, "most": True}}, "inner.most is of type bool"),
        ({"inner": {"number": 1, "most": -1}}, "inner.most is -1"),
        ({"inners": [{"number": 1}, 2]}, r"inners\[1\] is of type int, not dict"),
        ({"pairs": [["a"]]}, r"pairs\[0\] has 1 entries in place of 2"),
        ({"env": {"A": None}}, r"env\['A'\] is of type NoneType, not str"),
        ({"cpus": "0-x"}, "cpus is no cpulist"),
        ({"ready": 1}, "ready is of type int, not bool"),
        ({"paths": None}, "paths is of type NoneType, not list"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(change: dict[str, object], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        convert(Outer, {**WHOLE, **change}, 0)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, b"\xff", "NaN", "[Infinity]", "9" * 100_000, "[]"])
def test_what_is_no_json_or_no_object(text: str | bytes) -> None:
    with pytest.raises(DecodeError):
        load(Outer, text)


values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(name=st.sampled_from(sorted(WHOLE)), value=values)
def test_any_value_in_any_place_fits_or_is_an_error(name: str, value: object) -> None:
    try:
        found = convert(Outer, {**WHOLE, name: value}, 0)
    except DecodeError:
        return
    assert isinstance(found, Outer) and all(number >= 0 for _, number in found.pairs)


def test_what_is_written_is_read_back() -> None:
    whole = convert(Outer, WHOLE)
    assert load(Outer, dump(whole)) == whole and load(Outer, dump(whole, indent=1)) == whole
    assert '"cpus":"0-2,7"' in dump(whole) and '"from":"b"' in dump(whole)
    with pytest.raises(ValueError, match="JSON"):
        dump(Inner(1, inf))
