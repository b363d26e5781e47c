"""Command lines and what they say, from tables: `answers`, `errors` and `exit_codes` in `tests/data`."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import errors
from tests.data_files import prepare, read_cases
from tests.docs.generate import DOCS
from tests.seam import Result, in_shell, run_inside

RANK = f'launch-rank() {{ LOCAL_RANK=0 {sys.executable} -m launcher.rank "$@"; }}'
EXITS = read_cases("exit_codes", "exit")


@pytest.mark.parametrize("answer", read_cases("answers", "answer"), ids=lambda answer: answer["about"])
def test_an_answer_has_these_values(
    answer: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(answer, here, monkeypatch)
    before = sorted(here.rglob("*"))
    wrong = []
    for line, expected in answer["lines"]:
        words = shlex.split(fill_in(f"{answer.get('with', '')} {line}", here))
        done = run_inside(words)
        if done.code != expected.pop("code", 0):
            wrong.append(f"{line}: {done}")
        else:
            found = {key: look_up(key, value, words, done) for key, value in expected.items()}
            wrong += [f"{line}: {key} is {found[key]!r}" for key in expected if found[key] != expected[key]]
        if (now := sorted(here.rglob("*"))) != before:
            wrong.append(f"{line} leaves {now}")
    assert not wrong, "\n".join(wrong)


def fill_in(text: str, here: Path) -> str:
    return text.replace("{here}", str(here)).replace("{python}", sys.executable)


def look_up(key: str, expected: object, words: list[str], done: Result) -> object:
    """The value of a key in an answer; of a stream, which of the expected parts are (not) in it, or all."""
    if key in ("out", "err", "no_out", "no_err"):
        stream = done.err if key.endswith("err") else done.out
        if not isinstance(expected, list):
            return stream
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


@pytest.mark.parametrize("mistake", read_cases("errors", "mistake"), ids=lambda mistake: mistake["about"])
def test_a_mistake_is_one_line_and_leaves_nothing(
    mistake: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(mistake, here, monkeypatch)
    before = sorted(here.rglob("*"))
    wrong = []
    for line, *says in mistake["lines"]:
        words = f"{line} {mistake.get('after', '')}".replace("{here}", str(here))
        done = run_inside(shlex.split(words))
        one = done.err.startswith("launch: error: ") and done.err.count("\n") == 1
        named = all(part.replace("{here}", str(here)) in done.err for part in says)
        hidden = not any(part in done.err for part in mistake.get("hides", ()))
        if (done.code, done.out, one, named, hidden) != (mistake.get("code", 2), "", True, True, True):
            wrong.append(f"{line}: {says} is not in {done}")
        elif (now := sorted(here.rglob("*"))) != before:
            wrong.append(f"{line} leaves {now}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.parametrize("exit_", EXITS, ids=lambda exit_: exit_["cause"])
def test_a_command_ends_with_its_code(
    exit_: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What starts nothing, and is no shell's, is asked in this process."""
    prepare(exit_, here, monkeypatch)
    verb, *words = shlex.split(exit_["line"])
    is_asked = verb == "launch" and not {"--", "|", ">"} & set(words)
    done = run_inside(words) if is_asked else in_shell(f"{RANK}; {exit_['line']}", here)
    assert done.code == exit_["code"], done
    assert "internal error" not in done.err


def test_the_documents_have_each_code_of_ours() -> None:
    text = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    table = text.partition("| exit code | meaning |")[2].partition("\n\n")[0]
    codes = {int(code) for code in re.findall(r"^\| (\d+) ", table, re.MULTILINE)}
    ours = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert codes == {0, 1, *ours} and "128+n" in table
    held = {each["code"] for each in EXITS if each["line"].startswith(("launch ", "PATH="))}
    assert codes <= held | {errors.EXIT_HANG, errors.EXIT_DEFECT}
