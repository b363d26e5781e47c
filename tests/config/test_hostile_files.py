"""Files that would hang whoever reads them, or never end: pipes, devices, aliases and references."""

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import files
from launcher.config import sources
from launcher.config.sources import MOST_BYTES, limit_work
from tests.seam import LAUNCH, Launch, clean_environ, run_outside

VERBS = (
    ["plan"],
    ["topo"],
    ["doctor"],
    ["status"],
    ["logs", "x"],
    ["cancel", "x"],
    ["tune", "dataloader", "dry_run=true", "--", "true"],
    ["dry_run=true"],
    ["-m", "nproc_per_node=1,2", "dry_run=true"],
    ["--cfg", "job"],
    ["--info", "defaults"],
)


MERGES = "".join(f"  c{number}: {{<<: [{', '.join(['*a'] * 200)}]}}\n" for number in range(99))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def grow(levels: int, width: int = 10) -> str:
    """A list of aliases for lists of aliases …"""
    lines = [f"a0: &a0 [{', '.join('x' * width)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels + 1)]
    return "\n".join(f"  {line}" for line in lines) + "\n"


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_aliases_that_multiply_are_refused_by_every_verb(
    launch: Launch, here: Path, words: list[str]
) -> None:
    write(here / "conf/launch.yaml", f"defaults: [launch_defaults, _self_]\nprogram:\n{grow(9)}")
    launch(*words).assert_error(2, "conf/launch.yaml has 12345679", "aliases (*name)")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a: &a [*a]\n", "endlessly many"),
        ("a: &a {b: *a}\n", "endlessly many"),
        (f"a: &a {{b: 1}}\nb:\n{MERGES}", "59"),
    ],
)
def test_other_forms(launch: Launch, here: Path, text: str, count: str) -> None:
    write(here / "conf/experiment/x.yaml", text)
    launch("plan", "experiment=x").assert_error(2, f"experiment/x.yaml has {count}")


def test_a_shell_that_asks_for_completion_is_not_hung(here: Path) -> None:
    write(here / "conf/launch.yaml", f"program:\n{grow(9)}")
    done = run_outside(["-sc", "query=bash"], here, {"COMP_LINE": "launch mod"}, timeout=30)
    assert (done.code, done.out, done.err) == (0, "", "")


def test_aliases_that_do_not_multiply_are_fine(launch: Launch, here: Path) -> None:
    text = f"defaults: [launch_defaults, _self_]\nmodel:\n{grow(2)}\n  text: '&a *b'\n"
    write(here / "conf/launch.yaml", text)
    result = launch("--cfg", "job")
    assert result.code == 0 and "a2:" in result.out, result.err


def refer(levels: int, section: str, first: str, each: str, join: str) -> str:
    """A section whose entries refer ten times to the one before."""
    lines = [f"  a0: {first}"]
    for level in range(1, levels + 1):
        references = join.join(["${" + f"{section}.a{level - 1}" + "}"] * 10)
        lines.append(f"  a{level}: {each % references}")
    return "\n".join([f"{section}:", *lines]) + "\n"


@pytest.mark.parametrize(
    "text",
    [refer(9, "env", "xxxxxxxxxx", "%s", ""), refer(9, "model", "[1]", "['%s']", "', '")],
    ids=["texts", "lists"],
)
def test_references_that_multiply_end_at_a_limit(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(sources, "limit_work", lambda _: limit_work(1.0))
    write(here / "conf/launch.yaml", f"defaults: [launch_defaults, _self_]\n{text}")
    result = launch("plan")
    assert (result.code, result.out) == (2, "")
    assert "takes more than 1 s to put together" in result.err and "conf" in result.err


def test_defaults_that_multiply_end_at_a_limit(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "limit_work", lambda _: limit_work(1.0))
    for level in range(9):
        entries = "".join(f"  - c{level + 1}@p{number}\n" for number in range(10))
        write(here / f"conf/g/c{level}.yaml", f"defaults:\n{entries}")
    write(here / "conf/g/c9.yaml", "x: 1\n")
    launch("plan", "+g=c0").assert_error(2, "takes more than 1 s to put together")


def test_a_sweep_that_multiplies_ends_at_a_limit(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "limit_work", lambda _: limit_work(1.0))
    many = [f"env.{name}=range(100)" for name in "ABCDE"]
    launch("-m", *many, "dry_run=true").assert_error(2, "takes more than 1 s to put together")


@pytest.mark.parametrize("form", ["bomb", "pipe", "device", "primary"])
def test_folders_of_the_search_path_are_no_way_around(launch: Launch, here: Path, form: str) -> None:
    """Hydra finds what is in `hydra.searchpath` by itself."""
    write(here / "more/model/x.yaml", grow(9) if form == "bomb" else "a: 1\n")
    if form in ("pipe", "device"):
        (here / "more/model/x.yaml").unlink()
        (here / "more/model/x.yaml").symlink_to("/dev/zero") if form == "device" else os.mkfifo(
            here / "more/model/x.yaml"
        )
    bomb = f"program:\n{grow(9)}" if form == "primary" else ""
    text = f"defaults: [launch_defaults, _self_]\nhydra: {{searchpath: [file://{here}/more]}}\n{bomb}"
    write(here / "conf/launch.yaml", text)
    told = {"bomb": "x.yaml has 12345679", "primary": "launch.yaml has 12345679"}
    launch("plan", "model=x").assert_error(2, told.get(form, "no 'x' in model"))


def test_a_file_that_is_too_large(launch: Launch, here: Path) -> None:
    write(here / "conf/launch.yaml", "#" * MOST_BYTES + "\n")
    launch("plan").assert_error(2, "conf/launch.yaml cannot be read (more than 512 KiB)")


def test_a_large_file_that_is_not_chosen_is_left(launch: Launch, here: Path) -> None:
    """A folder conf/ may be that of a training program, with files that are not for us."""
    write(here / "conf/vocabulary/large.yaml", "#" * MOST_BYTES + "\na: &a 1\nb: *a\n")
    result = launch("plan")
    assert result.code == 0, result.err


@pytest.mark.parametrize("name", ["launch.yaml", "model/tiny.yaml", "program/mine.yaml"])
def test_a_configuration_that_is_no_file(launch: Launch, here: Path, name: str) -> None:
    path = here / "conf" / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    launch("plan").assert_error(2, f"conf/{name} is no regular file: move it away")
    assert launch("--help-all").code == 0
    path.unlink()
    path.symlink_to("/dev/zero")
    launch("status").assert_error(2, f"conf/{name} is no regular file")


@pytest.mark.parametrize("key", ["machine.snapshot", "env.from_file"])
def test_a_pipe_from_which_nothing_comes(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    os.mkfifo(here / "pipe")
    launch("plan", f"{key}=pipe").assert_error(
        2, f"{key}=pipe cannot be read (nothing came from it in 0.1 s)"
    )


def test_a_command_in_place_of_a_file(here: Path) -> None:
    """As in `env.from_file=<(pass show hf)`, whose output may come late."""
    assert run_outside(["topo", "save=node.json"], here).code == 0
    write(here / "late.sh", "sleep 0.2; echo A=1; sleep 0.2; echo B=two\n")
    words = "plan explain=true machine.snapshot=<(cat node.json) env.from_file=<(sh late.sh)"
    script = f'launch() {{ "$@"; }}; launch "$@" {words}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *LAUNCH],
        cwd=here,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "two" in done.stdout


def limit_files(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_open_files_are_an_error_and_few_are_made_more(here: Path) -> None:
    words = ["nproc_per_node=2", "--", "true"]
    run_outside(words, here, preexec_fn=limit_files(12, 12)).assert_error(
        3, "may open 12 files", "needs 32", "ulimit -Hn"
    )
    assert not (here / "runs").exists()
    done = run_outside(words, here, preexec_fn=limit_files(12, 256))
    assert done.code == 0, done.err
