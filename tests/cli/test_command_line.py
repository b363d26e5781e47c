"""The words of a command line: where the program begins, Hydra's flags, and a help that can be typed."""

import json
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from launcher.cli.main import parse_command
from launcher.errors import UsageError
from tests.cli.make_runs import make_run, make_watched_run
from tests.data_files import DATA
from tests.golden.outputs import path_of
from tests.seam import Launch, Result, list_loaded

VERBS: list[str] = json.loads(path_of("help").read_text())["verbs"]
CONF = Path(__file__).parents[2] / "conf"
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())


@pytest.fixture
def files(here: Path) -> Path:
    """A folder with a script, an executable, and files that are named as other words are."""
    for name in ("train.py", "train", "plan", "conf=x", "x=1.py", "llama"):
        (here / name).touch()
    (here / "package").mkdir()
    return here


def test_where_the_program_begins(files: Path) -> None:
    lines = tomllib.loads((DATA / "command_lines.toml").read_text())["lines"]
    for line, words, *program in lines:
        for verb, first in (("run", ""), ("plan", "plan "), ("tune", "tune dataloader ")):
            command = parse_command(f"{first}{line}".split())
            found = (command.verb, " ".join(command.words), command.program)
            assert found == (verb, words, tuple(program[0].split()) if program else None), line
    # A verb is no program, even if there is a file of its name.
    with pytest.raises(UsageError, match="plan is a verb, which stands first"):
        parse_command(["nodes=2", "plan"])


def test_a_program_without_dashes_is_the_one_with_them(launch: Launch, files: Path) -> None:
    (files / "package/train.py").touch()
    for words in (["train.py", "--lr", "1e-4", "--", "nodes=x"], ["-m", "package.train", "--help"]):
        without = launch("dry_run=true", "nproc_per_node=2", *words)
        assert without.code == 0 and without.out
        assert without == launch("dry_run=true", "nproc_per_node=2", "--", *words)
    assert launch("plan", "train.py", "--help").out == launch("plan", "--", "train.py").out
    tune = ("tune", "dataloader", "dry_run=true")
    tuned = launch(*tune, "train.py", "--lr", "1")
    assert tuned.code == 0 and tuned == launch(*tune, "--", "train.py", "--lr", "1")


def test_what_hydras_flags_print(launch: Launch, here: Path) -> None:
    for what, parts in {
        "searchpath": ["file://", "structured://"],
        "defaults": ["launch_schema", "model/tiny", "binding/exclusive"],
        "defaults-tree": ["launch:", "model: tiny"],
        "config": ["Config", "nproc_per_node: auto"],
        "plugins": ["BashCompletion"],
        "all": ["Defaults Tree", "nproc_per_node: auto"],
    }.items():
        result = launch("--info", what)
        assert (result.code, result.err) == (0, "")
        assert all(part in result.out for part in parts), (what, result.out)
    assert not list(here.iterdir())
    result = launch("--hydra-help")
    assert (result.code, result.err) == (0, "") and "Hydra" in result.out and "--multirun" in result.out


def test_help_is_always_there_and_fits_a_terminal(launch: Launch) -> None:
    for words in (["-h"], ["nodes=0", "-h"], ["modle=x", "--help"]):
        assert launch(*words) == launch("--help"), words
    assert launch("--version") == Result(0, f"launch {version('launch-ranks')}\n", "")
    lines = launch("--help").out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80 and lines[0].startswith("usage: launch")
    assert all(re.search(rf"\b{verb}\b", "\n".join(lines)) for verb in VERBS)
    for verb in VERBS:  # its help is of it alone
        text = launch(verb, "--help").out
        assert text.startswith(f"usage: launch {verb}") and max(map(len, text.splitlines())) <= 80
        assert {*re.findall(r"^  launch (\w+)", text, re.MULTILINE)} == {verb}
        assert "groups" not in text and "flags" not in text
        assert launch(verb, "--help-all").out == launch("--help-all").out


def test_the_whole_help_names_everything_and_only_what_there_is(launch: Launch) -> None:
    text = launch("--help-all").out
    assert max(map(len, text.splitlines())) <= 110
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", text, re.MULTILINE), verb
    for group in GROUPS:
        options = {path.stem for path in (CONF / group).glob("*.yaml")}
        shown = re.search(rf"^  {group} .*\n(?: {{18}}.*\n)*", text, re.MULTILINE)
        assert shown and options <= set(re.findall(r"[\w-]+", shown[0])), group
    flag = r"(?<![\w-])--?[a-z][a-z-]+"
    flags = {*re.findall(flag, launch("--hydra-help").out)}
    assert len(flags) > 10 and flags <= {*re.findall(flag, text)}, flags
    text += "".join(launch(verb, "--help").out for verb in VERBS)
    keys = set(re.findall(r"^  ((?:[a-z]+_?)+)(?:[.,=| ]|$)", text, re.MULTILINE))
    assert len(keys) > 15
    assert keys - {"launch"} <= yaml.safe_load(launch("--cfg", "job").out).keys() | {*VERBS, *GROUPS}


def test_every_example_of_the_help_runs(launch: Launch, files: Path) -> None:
    (files / "package/train.py").touch()
    (files / "train").chmod(0o755)
    make_run(files / "runs", "train")
    for job in ("12", "13"):
        make_run(files / "runs", "other", f"20260801-1200{job}", slurm={"job_id": job})
    for words in (["--help"], ["--help-all"], *([verb, "--help"] for verb in VERBS)):
        lines = [line.strip() for line in launch(*words).out.partition("\n\n")[2].splitlines()]
        # Without what explains them.
        examples = [re.split(r" {2,}", line)[0] for line in lines if line.startswith("launch")]
        assert len(examples) >= (5 if len(words) == 1 else 2)
        for example in dict.fromkeys(each.replace("PROGRAM", "./train") for each in examples):
            verb, *after = example.split()[1:] or [""]
            started = [verb, *after]
            if verb not in ("status", "logs", "watch", "cancel", "plan", "topo", "doctor", "nodes"):
                start = [verb, *after[: verb == "tune"]] if verb in VERBS else []
                started = [*start, "dry_run=true", *example.split()[1 + len(start) :]]
            result = launch(*started)
            assert result.code == 0 or verb == "doctor", (example, result.err)
            assert "launch: error:" not in result.err, result.err


def test_few_modules_are_loaded(here: Path) -> None:
    """Each costs a start some milliseconds; what starts processes early is for runs alone."""
    make_watched_run(here / "runs")
    for words, most in ((["status"], 35), (["dry_run=true"], 50)):
        ours = {name for name in list_loaded(words, here) if name.startswith("launcher.")}
        assert "launcher.cli.main" in ours and "launcher.cli.early_start" not in ours
        assert len(ours) <= most, sorted(ours)
