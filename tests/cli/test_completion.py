"""Shell completion, as a shell uses it."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli.arguments import VERBS
from launcher.cli.completion import answer_query, split_line
from tests.conftest import Result, clean_environ

Launch = Callable[..., Result]


def ask(line: str) -> list[str]:
    return answer_query("query=bash", line, VERBS)


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
    assert ask("launch model=mi") == ["model=mine", "model=mistral7b"]
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
    import os

    monkeypatch.delenv("COMP_LINE", raising=False)
    before = dict(os.environ)
    launch("-sc", "query=bash")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "words",
    [
        ["-sc"],
        ["-sc", "install=tcsh"],
        ["-sc", "install="],
        ["-sc", "nonsense=bash"],
        ["-sc", "query=tcsh", "x=1"],
    ],
)
def test_a_wrong_request_says_what_to_write(launch: Launch, words: list[str]) -> None:
    launch(*words).assert_error(2)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_something_to_evaluate(launch: Launch, shell: str) -> None:
    result = launch("-sc", f"install={shell}")
    assert (result.code, result.err) == (0, "")
    assert "complete" in result.out
    assert launch("-sc", f"uninstall={shell}").code == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("launch a b", ["launch", "a", "b"]),
        ("launch a ", ["launch", "a", ""]),
        ("launch 'a b' c", ["launch", "a b", "c"]),
        ("launch 'a b", ["launch", "a b"]),
        ('launch "a ', ["launch", "a "]),
        ("launch ", ["launch", ""]),
    ],
)
def test_lines_are_split_as_a_shell_does(line: str, words: list[str]) -> None:
    assert split_line(line) == words


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
