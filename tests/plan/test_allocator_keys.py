"""The table of the allocator's settings: by release, by value, and beside the installed torch."""

import json
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from launcher.config.rules import parse_version, read_torch_version
from launcher.plan.allocator import (
    KNOWN,
    NEWEST,
    OLDEST,
    SPLIT,
    Version,
    find_fault,
    format_settings,
    list_known_keys,
    parse_settings,
    read_settings,
)
from tests.seam import clean_environ

CORE = (
    *(
        "large_segment_size_mb",
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "garbage_collection_threshold",
    ),
    *("roundup_power2_divisions", "expandable_segments", "pinned_use_background_threads"),
    *("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"),
)
"""Settings of all accelerators, which a CPU build of torch reads, too."""
RIGHT = {
    "bool": ("True", "False"),
    "whole": ("64", "2147483647"),
    "power": ("1", "8", "128"),
    "fraction": ("0.8", ".5", "1e-3", "0.999"),
    "share": ("0", "1", "0.5"),
    "backend": ("native", "cudaMallocAsync"),
    "divisions": ("1", "4", "[256:1]", "[256:1,512:0,1024:4,>:8]", "[>:8]"),
    "reserve": ("0.5", "40G", "1.5g"),
    "reserves": ("[serving:0.25,capture:8G]",),
}
WRONG = {
    "bool": ("true", "TRUE", "1", "yes", "", "None"),
    "whole": ("", "abc", "64abc", "1.5", "-1", "1e3", "99999999999", "²", "[64]"),
    "power": ("0", "3", "256", "-2", "x"),
    "fraction": ("0", "1", "1.5", "-0.1", "x", "nan", "0_1.5", ""),
    "share": ("-0.1", "1.1", "nan", "half"),
    "backend": ("cudamallocasync", "native ", "async"),
    "divisions": (
        "0",
        "3",
        "x",
        "[]",
        "[256:3]",
        "[3:1]",
        "[0:1]",
        "[256]",
        "[256:1",
        "[256:1;512:2]",
        "[15361]",
    ),
    "reserve": ("0", "-1G", "G", "inf", "40M"),
    "reserves": ("[]", "0.5", "[serving]", "[serving:0]", "[:1G]"),
}
LAX = frozenset({"64abc", "1.5", "-1", "1e3", "99999999999", "[]", "[64]"})
"""Wrong values that torch takes all the same, for something else than they look like."""
INSTALLED = parse_version(read_torch_version())
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
CONFIGURED: tuple[dict[str, object], ...] = (
    {"expandable_segments": True},
    {"expandable_segments": "false", "max_split_size_mb": 512.0},
    {"max_split_size_mb": 512, "garbage_collection_threshold": 0.8},
    {"backend": "cudaMallocAsync"},
    {"roundup_power2_divisions": ["256:1", "512:2", ">:8"]},
    {
        "roundup_power2_divisions": {256: 1, 512: 2, ">": 8},
        "large_segment_size_mb": 64,
        "max_split_size_mb": 64,
    },
    {"roundup_power2_divisions": 4, "max_non_split_rounding_mb": None, "host": "tcmalloc"},
    {"pinned_use_background_threads": True, "pinned_max_cached_size_mb": 1024},
)
"""What `allocator` holds in configurations."""


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


def judge(name: str, text: str) -> bool:
    """Whether our table takes a value."""
    return not find_fault(name, {name: text}, INSTALLED)


def test_the_installed_torch_takes_what_the_table_takes_and_what_the_launcher_writes() -> None:
    """Every right and wrong value of its settings for all accelerators; torch is laxer with numbers alone."""
    values = [
        (name, value)
        for name in CORE
        for value in (*RIGHT[KNOWN[name].kind], *WRONG[KNOWN[name].kind])
        if value and KNOWN[name].since <= (INSTALLED or OLDEST)
    ]
    values += [(name, value) for name in SPLIT for value in ("19", "20")]
    values += [("large_segment_size_mb", value) for value in ("10", "11")]
    written = [format_settings(read_settings(given)) for given in CONFIGURED]
    answers = ask_torch([f"{name}:{value}" for name, value in values] + written)
    differ = [
        (name, value)
        for (name, value), takes in zip(values, answers[: len(values)], strict=True)
        if takes != judge(name, value) and not (takes and value in LAX)
    ]
    assert differ == []
    refused = [text for text, takes in zip(written, answers[len(values) :], strict=True) if not takes]
    assert refused == []
    assert not all(answers)


def test_the_installed_torch_has_the_settings_that_the_table_says() -> None:
    body = re.search(r"getKeys\(\) \{.*?keys\{(.*?)\};", HEADER.read_text(), re.DOTALL)
    assert body, "torch before 2.10 has no list of its keys"
    joined = re.sub(r'"\s+"', "", re.sub(r"//[^\n]*", "", body[1]))
    known = {key for key in list_known_keys(INSTALLED) if key not in CORE}
    assert known == set(re.findall(r'"(\w+)"', joined))


@pytest.mark.parametrize("name", KNOWN)
def test_right_and_wrong_values(name: str) -> None:
    kind = KNOWN[name].kind
    assert [value for value in RIGHT[kind] if find_fault(name, {name: value}, NEWEST)] == []
    assert [value for value in WRONG[kind] if not find_fault(name, {name: value}, NEWEST)] == []
    assert [value for value in RIGHT[kind] if parse_settings(f"{name}:{value}") != {name: value}] == []


def test_each_release_has_its_settings() -> None:
    counts: dict[Version | None, int] = {(2, 5): 12, (2, 8): 12, (2, 9): 13, (2, 10): 15, (2, 11): 16}
    for version, count in (counts | {(2, 12): 18, (2, 13): 20, (2, 15): 22, None: 22}).items():
        assert len(list_known_keys(version)) == count


@pytest.mark.parametrize(
    ("version", "settings", "fault"),
    [
        ((2, 9), {"max_split_size_mb": "20"}, "a whole number of at least 21"),
        ((2, 10), {"max_split_size_mb": "20"}, ""),
        (None, {"max_split_size_mb": "20"}, ""),
        (
            (2, 13),
            {"max_split_size_mb": "32", "large_segment_size_mb": "64"},
            "a whole number of at least 64",
        ),
        ((2, 13), {"max_split_size_mb": "12", "large_segment_size_mb": "12"}, ""),
        ((2, 13), {"max_split_size_mb": "32", "large_segment_size_mb": "x"}, ""),
    ],
)
def test_a_block_that_may_be_split_is_no_smaller_than_a_segment(
    version: Version | None, settings: dict[str, str], fault: str
) -> None:
    assert find_fault("max_split_size_mb", settings, version) == fault


def test_versions_and_the_notation_are_read() -> None:
    texts = {"2.13.0+cpu": (2, 13), "2.14.0.dev20260701+cu130": (2, 14), "2.6.0a0+git1": (2, 6)}
    for text, version in {**texts, "": None, "x": None}.items():
        assert parse_version(text) == version
    settings = {"a": "1", "roundup_power2_divisions": "[256:1,>:8]", "by_class": "[x:8G]"}
    assert parse_settings(format_settings(settings)) == settings
    assert parse_settings("") == {}
    broken = ", a a: :1 a:1,,b:2 a:[1 a:1] a:[1][2] a:b:c [a:1 a:1;b:2:3"
    assert [text for text in broken.split(" ") if parse_settings(text) is not None] == []
