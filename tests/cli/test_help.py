"""`launch --help` names everything, and what it shows can be typed."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.cli.make_runs import make_run
from tests.golden.outputs import path_of
from tests.seam import Launch

VERBS = json.loads(path_of("help").read_text())["verbs"]
CONF = Path(__file__).parents[2] / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    "words", [["--help"], ["-h"], ["plan", "--help"], ["nodes=0", "-h"], ["modle=x", "--help"]]
)
def test_help_is_always_there(launch: Launch, words: list[str]) -> None:
    result = launch(*words)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("usage: launch")
    assert max(map(len, result.out.splitlines())) <= 110


def test_the_help_fits_a_terminal(launch: Launch) -> None:
    lines = launch("--help").out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert all(re.search(rf"\b{verb}\b", "\n".join(lines)) for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_is_of_it_alone(launch: Launch, verb: str) -> None:
    text = launch(verb, "--help").out
    assert text.startswith(f"usage: launch {verb}") and max(map(len, text.splitlines())) <= 80
    others = set(re.findall(r"^  launch (\w+)", text, re.MULTILINE))
    assert others == {verb}
    assert "groups" not in text and "flags" not in text
    assert launch(verb, "--help-all").out == launch("--help-all").out


def test_every_verb_group_option_and_flag_is_named(launch: Launch) -> None:
    text = launch("--help-all").out
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", text, re.MULTILINE), verb
    for group in GROUPS:
        options = {path.stem for path in (CONF / group).glob("*.yaml")}
        shown = re.search(rf"^  {group} .*\n(?: {{18}}.*\n)*", text, re.MULTILINE)
        assert shown and options <= set(re.findall(r"[\w-]+", shown[0])), group
    flags = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]+", launch("--hydra-help").out))
    assert len(flags) > 10 and flags <= set(re.findall(r"(?<![\w-])--?[a-z][a-z-]+", text)), flags


def test_every_key_that_is_named_exists(launch: Launch) -> None:
    text = "".join(launch(*words).out for words in (["--help-all"], *([verb, "--help"] for verb in VERBS)))
    keys = set(re.findall(r"^  ((?:[a-z]+_?)+)(?:[.,=| ]|$)", text, re.MULTILINE))
    known = yaml.safe_load(launch("--cfg", "job").out).keys() | {*VERBS, *GROUPS}
    assert len(keys) > 15
    assert keys - {"launch"} <= known


def list_examples(text: str) -> list[str]:
    """The command lines in a help text: those below `usage`, without what explains them."""
    lines = [line.strip() for line in text.partition("\n\n")[2].splitlines()]
    return [re.split(r" {2,}", line)[0] for line in lines if line.startswith("launch")]


@pytest.mark.parametrize(
    "words", [["--help"], ["--help-all"], *([verb, "--help"] for verb in VERBS)], ids=" ".join
)
def test_every_example_runs(launch: Launch, here: Path, words: list[str]) -> None:
    (here / "train.py").touch()
    (here / "train").touch(0o755)
    (here / "package").mkdir()
    (here / "package/train.py").touch()
    make_run(here / "runs", "train")
    for job in ("12", "13"):
        make_run(here / "runs", "other", f"20260801-1200{job}", slurm={"job_id": job})
    examples = list_examples(launch(*words).out)
    assert len(examples) >= (5 if len(words) == 1 else 2)
    for example in (each.replace("PROGRAM", "./train") for each in examples):
        verb, *after = example.split()[1:] or [""]
        if verb in ("status", "logs", "watch", "cancel", "plan", "topo", "doctor", "nodes"):
            started = [verb, *after]
        else:
            start = [verb] if verb in VERBS else []
            start += after[:1] if verb == "tune" else []
            started = [*start, "dry_run=true", *example.split()[1 + len(start) :]]
        result = launch(*started)
        assert result.code == (0 if verb != "doctor" else result.code), (example, result.err)
        assert "launch: error:" not in result.err, result.err


def test_the_version_is_the_packages(launch: Launch) -> None:
    from importlib.metadata import version

    assert launch("--version").out == f"launch {version('launch-ranks')}\n"
