"""Shell completion, as a shell uses it."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.make_runs import make_run
from tests.launch.terminals import open_terminal
from tests.seam import Launch, clean_environ, run_inside


def ask(line: str) -> list[str]:
    """What may stand where a line ends, as bash asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMP_LINE", line)
        done = run_inside(["-sc", "query=bash"])
    assert (done.code, done.err) == (0, ""), done
    return done.out.splitlines()


def test_the_first_word_is_a_verb_a_group_or_a_key(here: Path) -> None:
    answers = ask("launch ")
    assert {"plan", "model=", "binding=", "nproc_per_node=", "torchrun.", "env."} <= set(answers)
    assert ask("launch pl") == ["plan"]


def test_after_a_verb_come_keys_and_no_verb(here: Path) -> None:
    assert "plan" not in ask("launch plan ")
    assert "nproc_per_node=" in ask("launch plan nproc")


@pytest.mark.parametrize(
    "prefix", ["", "plan ", "nodes=1 ", "+model=gpt2 ", "-m ", "binding=numa model=tiny ", "-cd . "]
)
def test_options_of_a_group(here: Path, prefix: str) -> None:
    assert ask(f"launch {prefix}model=llama") == [
        "model=llama13b",
        "model=llama1b",
        "model=llama3_8b",
        "model=llama70b",
        "model=llama7b",
    ]
    assert ask(f"launch {prefix}+model=gp") == ["+model=gpt2"]


def test_keys_below_a_key_and_the_present_value(here: Path) -> None:
    assert "torchrun.max_restarts=" in ask("launch torchrun.max")
    assert ask("launch model.lay") == ["model.layers="]
    assert ask("launch model=llama7b model.layers=") == ["model.layers=32"]


def test_files_after_an_equals_sign(here: Path) -> None:
    (here / "data").mkdir()
    assert ask("launch data.path=./da") == ["data.path=./data"]


def test_scripts_and_folders_before_the_program_and_nothing_in_it(here: Path) -> None:
    (here / "train.py").touch()
    (here / "tr.txt").touch()
    (here / ".tr.py").touch()
    (here / "tried").mkdir()
    (here / "tried/eval.py").touch()
    assert ask("launch nodes=1 tr") == ["train.py", "tried/"]
    assert ask("launch tried/") == ["tried/eval.py"] == ask("launch plan tried/e")
    assert ask("launch train.py mod") == [] == ask("launch -m tried.eval --c") == ask("launch plan train.py ")
    assert ask("launch -m tr") == ["train.py", "tried/"]
    assert "model=" in ask("launch -m ")


def test_values_of_flags(here: Path) -> None:
    assert ask("launch --cfg ") == ["job", "hydra", "all"]
    assert ask("launch -i de") == ["defaults", "defaults-tree"]
    assert ask("launch -cd ") == []


def test_flags(here: Path) -> None:
    assert ask("launch --c") == ["--cfg", "--config-dir", "--config-name", "--config-path"]
    assert ask("launch nodes=1 --hel") == ["--help", "--help-all"]


def test_nothing_after_the_two_dashes(here: Path) -> None:
    assert ask("launch -- ") == []
    assert ask("launch -- --c") == []
    assert ask("launch nodes=1 -- train.py mod") == []
    assert ask("launch --") != []


def test_groups_of_the_working_directory_and_of_a_named_folder(here: Path) -> None:
    for folder, name in (("conf", "mine"), ("team", "theirs")):
        (here / folder / "model").mkdir(parents=True)
        (here / folder / "model" / f"{name}.yaml").write_text("name: x\n")
    assert ask("launch model=mi") == ["model=mine", "model=mistral7b", "model=mixtral8x7b"]
    assert ask("launch -cd team model=th") == ["model=theirs"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "launch",
        "launch 'open",
        'launch "open model=',
        "launch --nonsense ",
        "launch a=b=c ",
        "launch model=nonsuch x",
        "launch =",
        "launch +",
        "launch ~mod",
        "launch \\",
        "launch 'a -x",
        "launch ${",
        "launch $(x) `",
        "launch model.layers.x.",
        "launch é",
        "launch -cd nowhere model=",
        "launch env.A='a -x' model=gp",
        "launch \udcff",
        "launch -p ",
        "launch @",
        "launch a@b=",
        "launch\tmodel=gp",
    ],
)
def test_a_line_that_makes_no_sense_yet_is_no_error(
    here: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    result = launch("-sc", "query=bash")
    assert (result.code, result.err) == (0, ""), result


def test_broken_configuration_is_no_error_either(
    here: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "conf").mkdir()
    (here / "conf/launch.yaml").write_text("a: [1\n")
    monkeypatch.setenv("COMP_LINE", "launch pl")
    result = launch("-sc", "query=bash")
    assert (result.code, result.out, result.err) == (0, "plan\n", "")


def test_the_environment_is_as_it_was(here: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMP_LINE", raising=False)
    before = dict(os.environ)
    launch("-sc", "query=bash")
    assert dict(os.environ) == before


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_something_to_evaluate(launch: Launch, shell: str) -> None:
    result = launch("-sc", f"install={shell}")
    assert (result.code, result.err) == (0, "")
    assert "complete" in result.out
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


def complete_in_bash(binaries: Path, folder: Path, *lines: str) -> list[list[str]]:
    """What bash has in COMPREPLY for each line, by the function that `launch -sc install=bash` registers."""
    asks = "\n".join(
        f"COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=($COMP_LINE)\n"
        f'COMP_CWORD={len(line.split(" ")) - 1}; COMPREPLY=(); $function launch; echo "${{COMPREPLY[*]}}"'
        for line in lines
    )
    script = (
        'eval "$(launch -sc install=bash)"\n'
        "function=$(complete -p launch | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n" + asks
    )
    bash = shutil.which("bash")
    assert bash
    path = f"{binaries}:{clean_environ()['PATH']}"
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        cwd=folder,
        env={**clean_environ(), "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


def test_in_a_real_bash(binaries: Path, here: Path) -> None:
    (here / "conf/model").mkdir(parents=True)
    (here / "conf/model/evil.yaml").write_text("name: $(touch$IFS'evil')\n")
    verbs, options, after, nothing, evil = complete_in_bash(
        binaries,
        here,
        "launch pl",
        "launch model=gp",
        "launch plan nproc",
        "launch -- tr",
        "launch model=evil model.name=",
    )
    assert (verbs, options, after, nothing) == (["plan"], ["model=gpt2"], ["nproc_per_node="], [])
    assert not (here / "evil").exists()
    assert evil == []


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
    """A folder with a script, its data, and runs."""
    (here / "train.py").touch()
    (here / "data").mkdir()
    (here / "data/corpus.txt").touch()
    make_run(here / "runs", "llama", "20260801-120000")
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
    options = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"]}[name]
    path = f"{binaries}:{clean_environ()['PATH']}"
    with open_terminal(
        project, find_shell(name), *options, "-i", PATH=path, EDITOR="", VISUAL=""
    ) as terminal:
        terminal.type(f'eval "$(launch -sc install={kind})"; echo rea""dy\n')
        terminal.expect("ready")
        for line, word in TYPED:
            terminal.type(f"{line}\t\x01printf '<%s>\\n' \x05\n")
            last = f"<{word.rstrip('/')}" + (
                "" if word.endswith("/") else ">"
            )  # zsh takes the slash off again
            words = [*(f"<{part}>" for part in line.split()[:-1]), last]
            shown = terminal.expect("<launch>", *words[1:])
            assert "command not found" not in shown
        terminal.type(f'eval "$(launch -sc uninstall={name})"; echo do""ne\n')
        assert "not found" not in terminal.expect("done")
        terminal.type("exit\n")
        terminal.finish()


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
