"""What `launch` answers to a command line that starts nothing, from `tests/data/answers.toml`."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data_files import prepare, read_cases
from tests.seam import Result, run_inside


@pytest.mark.parametrize("answer", read_cases("answers", "answer"), ids=lambda answer: answer["about"])
def test_an_answer_has_these_values(
    answer: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(answer, here, monkeypatch)
    wrong = []
    for line, expected in answer["lines"]:
        words = shlex.split(fill_in(f"{answer.get('with', '')} {line}", here))
        done = run_inside(words)
        if done.code != expected.pop("code", 0):
            wrong.append(f"{line}: {done}")
        else:
            found = {key: look_up(key, value, words, done) for key, value in expected.items()}
            wrong += [f"{line}: {key} is {found[key]!r}" for key in expected if found[key] != expected[key]]
    assert not wrong, "\n".join(wrong)


def fill_in(text: str, here: Path) -> str:
    return text.replace("{here}", str(here)).replace("{python}", sys.executable)


def look_up(key: str, expected: object, words: list[str], done: Result) -> object:
    """The value of a key in an answer; of a stream, which of the expected parts are (not) in it."""
    if key in ("out", "err", "no_out", "no_err"):
        stream = done.err if key.endswith("err") else done.out
        assert isinstance(expected, list)
        return [part for part in expected if (fill_in(part, Path.cwd()) in stream) != key.startswith("no_")]
    if "format=json" in words:
        values, rest = [], done.out
        while rest := rest.lstrip():
            value, end = json.JSONDecoder().raw_decode(rest)
            values.append(value)
            rest = rest[end:]
        return pick(values if "-m" in words else values[0], key.split("."))
    return pick(yaml.safe_load(done.out), key.split(".") if key else [])


def pick(value: object, keys: list[str]) -> object:
    """The value at dotted keys: `*` is each of a list, `#` its length; "absent" if there is none."""
    if not keys:
        return "null" if value is None else value
    key, *rest = keys
    if isinstance(value, list):
        if key == "#":
            return len(value)
        return [pick(each, rest) for each in value] if key == "*" else pick(value[int(key)], rest)
    return pick(value[key], rest) if isinstance(value, dict) and key in value else "absent"
