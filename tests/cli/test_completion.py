"""Shell completion, as a shell uses it."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.make_runs import make_run
from tests.data_files import prepare, read_cases
from tests.launch.terminals import open_terminal
from tests.seam import Launch, clean_environ, list_loaded, run_inside


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
    ("launch plan nproc", "nproc_per_node="),
    ("launch nodes=1 tr", "train.py"),
    ("launch train.py --data dat", "data/"),
    ("launch train.py --data data/co", "data/corpus.txt"),
    ("launch -- ./tr", "./train.py"),
    ("launch --hydra", "--hydra-help"),
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


def test_runs_of_another_folder(runs: Path) -> None:
    assert ask("launch status runs_dir=other g") == ["gpt/20260801-120003"]


def test_it_is_quick_since_nothing_heavy_is_loaded(runs: Path) -> None:
    loaded = list_loaded(["-sc", "query=bash"], runs, COMP_LINE="launch status l")
    assert "launcher.cli.completion" in loaded
    assert not {"hydra", "omegaconf", "rich", "torch", "submitit"} & loaded
