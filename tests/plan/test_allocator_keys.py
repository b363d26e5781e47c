"""The table of the allocator's settings: by release, by value, and beside the installed torch."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from launcher.plan.variables import KEYS, find_fault, format_settings, parse_settings, read_settings
from tests.seam import clean_environ

CASES = tomllib.loads(Path(__file__).with_name("allocator.toml").read_text())
CORE, RIGHT, WRONG = CASES["core"], CASES["right"], CASES["wrong"]
LAX = frozenset({"64abc", "1.5", "-1", "1e3", "99999999999", "[]", "[64]"})
"""Wrong values that torch takes all the same, for something else than they look like."""
INSTALLED = tuple(map(int, version("torch").split(".")[:2]))
HEADER = Path(str(distribution("torch").locate_file("torch/include/c10/cuda/CUDAAllocatorConfig.h")))
TRY = """
import json, sys, torch
def takes(text):
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (ValueError, RuntimeError, IndexError):
        return False
    finally:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    return True
print(json.dumps([takes(text) for text in json.load(sys.stdin)]))
"""


def ask_torch(texts: list[str]) -> list[bool]:
    """Whether the installed torch takes each of these settings."""
    done = subprocess.run(
        [sys.executable, "-c", TRY],
        input=json.dumps(texts),
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answers: list[bool] = json.loads(done.stdout)
    return answers


def test_the_installed_torch_takes_what_the_table_takes_and_what_the_launcher_writes() -> None:
    """Every right and wrong value of its settings for all accelerators; torch is laxer with numbers alone."""
    values = [
        (name, value)
        for name in CORE
        for value in (*RIGHT[KEYS[name][0]], *WRONG[KEYS[name][0]])
        if value and KEYS[name][1] <= INSTALLED
    ]
    written = [format_settings(read_settings(given)) for given in CASES["configured"]]
    answers = ask_torch([f"{name}:{value}" for name, value in values] + written)
    differ = [
        (name, value)
        for (name, value), takes in zip(values, answers[: len(values)], strict=True)
        if takes == bool(find_fault(name, value)) and not (takes and value in LAX)
    ]
    assert differ == []
    refused = [text for text, takes in zip(written, answers[len(values) :], strict=True) if not takes]
    assert refused == []
    assert not all(answers)


def test_the_installed_torch_has_the_settings_that_the_table_says() -> None:
    body = re.search(r"getKeys\(\) \{.*?keys\{(.*?)\};", HEADER.read_text(), re.DOTALL)
    assert body, "torch before 2.10 has no list of its keys"
    joined = re.sub(r'"\s+"', "", re.sub(r"//[^\n]*", "", body[1]))
    known = {key for key, (_, since) in KEYS.items() if since <= INSTALLED and key not in CORE}
    assert known == set(re.findall(r'"(\w+)"', joined))


@pytest.mark.parametrize("name", KEYS)
def test_right_and_wrong_values(name: str) -> None:
    kind = KEYS[name][0]
    assert [value for value in RIGHT[kind] if find_fault(name, value)] == []
    assert [value for value in WRONG[kind] if not find_fault(name, value)] == []
    assert [value for value in RIGHT[kind] if parse_settings(f"{name}:{value}") != {name: value}] == []


def test_the_notation_is_read() -> None:
    settings = {"a": "1", "roundup_power2_divisions": "[256:1,>:8]", "by_class": "[x:8G]"}
    assert parse_settings(format_settings(settings)) == settings
    assert parse_settings("") == {}
    broken = ", a a: :1 a:1,,b:2 a:[1 a:1] a:[1][2] a:b:c [a:1 a:1;b:2:3"
    assert [text for text in broken.split(" ") if parse_settings(text) is not None] == []
