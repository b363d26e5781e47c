"""`launch --help` names everything, and what it shows can be typed."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import errors
from launcher.cli.arguments import VERBS
from launcher.config.hydra_flags import make_parser
from launcher.config.schema import LaunchConfig
from launcher.config.search_path import find_sources
from tests.conftest import Result

Launch = Callable[..., Result]


@pytest.mark.parametrize(
    "words", [["--help"], ["-h"], ["plan", "--help"], ["nodes=0", "-h"], ["modle=x", "--help"]]
)
def test_help_is_always_there(launch: Launch, words: list[str]) -> None:
    result = launch(*words)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("usage: launch")
    assert max(map(len, result.out.splitlines())) <= 110


def test_every_verb_group_option_and_flag_is_named(launch: Launch, here: Path) -> None:
    text = launch("--help").out
    sources = find_sources(None, None, None)
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", text, re.MULTILINE), verb
    for group in sources.list_groups():
        shown = re.search(rf"^  {group} .*\n(?: {{18}}.*\n)*", text, re.MULTILINE)
        assert shown and set(sources.list_options(group)) <= set(re.findall(r"[\w-]+", shown[0])), group
    for action in make_parser()._actions:
        for option in action.option_strings:
            assert re.search(rf"(?<![\w-]){re.escape(option)}\b", text), option


def test_every_exit_code_is_named(launch: Launch) -> None:
    for text in (launch("--help").out, launch("plan", "--help").out):
        codes = text.partition("exit codes")[2]
        assert {str(errors.EXIT_USAGE), str(errors.EXIT_MACHINE), "128+n"} <= set(
            re.findall(r"[\d+n]+", codes)
        )


def test_every_key_that_is_named_exists(launch: Launch) -> None:
    text = launch("--help").out + launch("plan", "--help").out
    keys = set(re.findall(r"^  ((?:[a-z]+_?)+)(?:[.,=| ]|$)", text, re.MULTILINE))
    fields = (
        set(LaunchConfig.__dataclass_fields__)
        | set(VERBS)
        | set(find_sources(None, None, None).list_groups())
    )
    assert len(keys) > 15
    assert keys - {"launch"} <= fields


def list_examples(text: str) -> list[str]:
    """The command lines in a help text: those below `usage`, without what explains them."""
    lines = [line.strip() for line in text.partition("\n\n")[2].splitlines()]
    return [re.split(r" {2,}", line)[0] for line in lines if line.startswith("launch")]


def test_every_example_runs(launch: Launch, here: Path) -> None:
    (here / "train.py").touch()
    (here / "package").mkdir()
    (here / "package/train.py").touch()
    examples = list_examples(launch("--help").out)
    assert len(examples) >= 5
    for example in examples:
        words = example.split()[1:]
        at = words.index("--") if "--" in words else len(words)
        result = launch(*words[:at], "dry_run=true", *words[at:])
        assert result.code == 0, (example, result.err)


def test_the_version_is_the_packages(launch: Launch) -> None:
    from importlib.metadata import version

    assert launch("--version").out == f"launch {version('launch-ranks')}\n"
