"""The words of a command line: where the program begins, Hydra's flags, help to be typed, completion."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.main import parse_command
from launcher.errors import UsageError
from tests.cli.make_runs import make_run, make_watched_run
from tests.data_files import DATA, prepare, read_cases
from tests.golden.outputs import path_of
from tests.launch.terminals import open_terminal
from tests.seam import Launch, Result, clean_environ, list_loaded, run_inside

VERBS: list[str] = json.loads(path_of("outputs/help").read_text())["verbs"]
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
        assert "launcher.cli.main" in ours and "launcher.launch.warm.process" not in ours
        assert len(ours) <= most, sorted(ours)


def ask(line: str) -> list[str]:
    """What may stand where a line ends, as bash asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMP_LINE", line)
        done = run_inside(["-sc", "query=bash"])
    assert (done.code, done.err) == (0, ""), done
    return done.out.splitlines()


@pytest.mark.parametrize("case", read_cases("completions", "completion"), ids=lambda case: case["about"])
def test_answers(case: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(case, here, monkeypatch)
    for line, *answers in case["lines"]:
        found = ask(line)
        assert not answers or found == answers[0], line
    for line, some in case.get("has", {}).items():
        assert set(some) <= set(ask(line)), line
    for line, some in case.get("lacks", {}).items():
        assert not set(some) & set(ask(line)), line


def test_what_is_asked_and_evaluated(here: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("launch \udcff") == []  # no text is no error
    monkeypatch.delenv("COMP_LINE", raising=False)
    before = dict(os.environ)
    launch("-sc", "query=bash")
    assert dict(os.environ) == before
    for shell in ("bash", "zsh", "fish"):
        result = launch("-sc", f"install={shell}")
        assert (result.code, result.err) == (0, "") and "complete" in result.out
        assert launch("-sc", f"uninstall={shell}").code == 0


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `launch`, as pip installs it."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "launch"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nfrom launcher.cli.main import main\nsys.exit(main())\n"
    )
    script.chmod(0o755)
    return folder


def find_shell(name: str) -> str:
    """The path of a shell; without it the test fails where LAUNCH_CI is set, and skips elsewhere."""
    if found := shutil.which(name):
        return found
    lack = f"{name} is not installed (`apt-get install {name}`)"
    if os.environ.get("LAUNCH_CI"):
        pytest.fail(lack)
    pytest.skip(lack)


@pytest.fixture
def project(here: Path, binaries: Path) -> Path:
    """A folder with a script, its data, runs, and an answer that a shell would evaluate."""
    (here / "train.py").touch()
    (here / "data").mkdir()
    (here / "data/corpus.txt").touch()
    make_run(here / "runs", "llama", "20260801-120000")
    (here / "conf/model").mkdir(parents=True)
    (here / "conf/model/evil.yaml").write_text("name: $(touch$IFS'evil')\n")
    return here


TYPED = [
    ("launch pl", "plan"),
    ("launch nproc_per_node=2 model=gp", "model=gpt2"),
    ("launch nodes=1 tr", "train.py"),
    ("launch train.py --data dat", "data/"),
    ("launch train.py --data data/co", "data/corpus.txt"),
    ("launch -- ./tr", "./train.py"),
    ("launch logs ll", "llama/20260801-120000"),
]
"""What is typed before Tab, and the last word after it."""


@pytest.mark.parametrize(("name", "kind"), [("bash", "bash"), ("zsh", "zsh"), ("zsh", "bash")])
def test_tab_in_a_real_shell(project: Path, binaries: Path, name: str, kind: str) -> None:
    command = [find_shell(name), *{"bash": ["--norc", "--noprofile"], "zsh": ["-f"]}[name], "-i"]
    path = f"{binaries}:{clean_environ()['PATH']}"
    with open_terminal(project, *command, PATH=path, EDITOR="", VISUAL="") as terminal:
        terminal.type(f'eval "$(launch -sc install={kind})"; echo rea""dy\n')
        terminal.expect("ready")
        for line, word in TYPED:
            terminal.type(f"{line}\t\x01printf '<%s>\\n' \x05\n")
            last = f"<{word}>" if word[-1] != "/" else f"<{word[:-1]}"  # zsh takes the slash off again
            words = [*(f"<{part}>" for part in line.split()[:-1]), last]
            shown = terminal.expect("<launch>", *words[1:])
            assert "command not found" not in shown
        terminal.type("launch model=evil model.name=\t\x01: \x05\n")
        terminal.type(f'eval "$(launch -sc uninstall={name})"; echo do""ne\n')
        assert "not found" not in terminal.expect("done")
        terminal.type("exit\n")
        terminal.finish()
    assert not (project / "evil").exists()


def test_tab_in_a_real_fish(project: Path, binaries: Path) -> None:
    asks = "\n".join(f"echo '>'; complete -C {shlex.quote(line)}" for line, _ in TYPED)
    script = f"launch -sc install=fish | source\n{asks}\nlaunch -sc uninstall=fish | source"
    environ = {**clean_environ(), "PATH": f"{binaries}:{clean_environ()['PATH']}", "HOME": str(project)}
    command = [find_shell("fish"), "--no-config", "-c", script]
    done = subprocess.run(
        command, cwd=project, env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr == ""
    answers = [[each.split("\t")[0] for each in block.split()] for block in done.stdout.split(">\n")[1:]]
    assert answers == [[word] for _, word in TYPED]


@pytest.fixture
def runs(here: Path) -> Path:
    make_run(here / "runs", "llama", "20260801-120000", slurm={"job_id": "12_3"})
    make_run(here / "runs", "llama", "20260801-120001", "running", slurm={"job_id": "14"})
    make_run(here / "runs", "evil$(touch x)", "20260801-120002")
    make_run(here / "other", "gpt", "20260801-120003")
    return here


def test_runs_the_newest_first(runs: Path) -> None:
    names = ["llama/20260801-120001", "llama/20260801-120000"]
    assert ask("launch status ") == ["format=", "runs_dir=", *names]
    assert ask("launch logs ll") == names
    assert ask("launch cancel ") == ["yes=true", "runs_dir=", *names]
    assert ask("launch cancel llama/20260801-120001 l") == names[1:]
    assert ask("launch logs -f rank=0 lo") == ["logs.tail="]
    assert {"-f", "--config-dir"} <= set(ask("launch logs -"))
    assert ask("launch status -- ") == []
    assert ask("launch status runs_dir=none ") == ["format="]
    assert ask("launch status runs_dir=other g") == ["gpt/20260801-120003"]


def test_it_is_quick_since_nothing_heavy_is_loaded(runs: Path) -> None:
    loaded = list_loaded(["-sc", "query=bash"], runs, COMP_LINE="launch status l")
    assert "launcher.cli.completion" in loaded
    assert not {"hydra", "omegaconf", "rich", "torch", "submitit"} & loaded
