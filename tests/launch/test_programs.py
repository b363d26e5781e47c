"""Small programs with traps print, return and write in ranks what they do by python (`programs.toml`)."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.launch.frames import (
    Case,
    Ran,
    copy_programs,
    describe_difference,
    make_environ,
    make_launch,
    mask,
    run_alone,
    to_status,
)

GROUP = 6
"""Programs of a test, all of which one torchrun starts."""
SMOKE = ("files: return", "files: error")
WAYS = {"exec": ("start.warm=off",), "forked": ()}
PEER = """
import json, os, subprocess, sys
STREAMS = ("stdin", "stdout", "stderr")
for variable in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
    os.environ[variable] = "1"
number = os.environ["LOCAL_RANK"]
os.environ.update(RANK="0", LOCAL_RANK="0", MASTER_PORT=str(int(os.environ["MASTER_PORT"]) + 1 + int(number)))
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
words, folder, environ = json.load(open(sys.argv[1]))[int(number)]
streams = [open(folder + name, mode) for name, mode in ((".in", "rb"), (".out", "wb"), (".err", "wb"))]
code = subprocess.call(words, cwd=folder, env={**os.environ, **environ}, **dict(zip(STREAMS, streams)))
open(folder + ".code", "w").write(str(code))
"""
"""What torchrun starts in the place of each program, so that one may fail without the others."""
Left = tuple[Ran, dict[str, bytes]]
"""What a program has printed, and its files."""


@dataclass(frozen=True, slots=True)
class Program:
    """An entry of `programs.toml`."""

    case: Case
    files: Mapping[str, str]
    settings: tuple[str, ...]
    exec: str
    """Why ranks are not forked; empty if they are."""

    def write(self, folder: Path) -> Path:
        """Write its files into a folder for one run."""
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder


def read_programs() -> dict[str, Program]:
    """Read the programs by their names."""
    entries = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())["program"]
    by_name = {entry["name"]: entry for entry in entries}
    programs = {}
    for name, own in by_name.items():
        entry = {**by_name.get(own.get("of", name), {}), "settings": [], "argv": [], "exec": "", **own}
        words = tuple(entry.get("words", ["program.py", *entry["argv"]]))
        case = Case(name, words, stdin=entry.get("stdin", ""), environ=entry.get("environ", {}))
        files = {**entry.get("files", {}), "program.py": entry["code"]}
        programs[name] = Program(case, files, tuple(entry["settings"]), entry["exec"])
    assert len(programs) == len(entries), "two programs have the same name"
    return programs


PROGRAMS = read_programs()
NAMES = sorted(PROGRAMS)


def forget_folder(ran: Ran, folder: Path) -> Ran:
    """Leave the folder of a run out of what was printed."""
    return replace(ran, texts=tuple(text.replace(str(folder), "FOLDER") for text in ran.texts))


def read_files(folder: Path) -> dict[str, bytes]:
    """Return what a run has left, by path."""
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {
        str(path.relative_to(folder)): path.read_bytes().replace(os.fsencode(folder), b"FOLDER")
        for path in paths
    }


def run_by_torchrun(programs: Sequence[Program], folder: Path) -> list[Left]:
    """Run programs as ranks of one torchrun, each in a folder of its number."""
    jobs = []
    for number, program in enumerate(programs):
        work = program.write(folder / str(number))
        Path(f"{work}.in").write_text(program.case.stdin)
        python = [sys.executable, *program.case.words[program.case.words[0] == "python" :]]
        jobs.append([python, str(work), make_environ(program.case, folder)])
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "peer.py").write_text(PEER)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={len(jobs)}",
    ]
    command = [*torchrun, "peer.py", "jobs.json"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True, timeout=500)
    left = []
    for name in map(str, range(len(jobs))):
        work = folder / name
        texts = (mask(Path(f"{work}.out")), mask(Path(f"{work}.err")))
        ran = Ran(to_status(int(Path(f"{work}.code").read_text())), texts)
        left.append((forget_folder(ran, work), read_files(work)))
    return left


def compare(program: Program, folder: Path, ways: Mapping[str, tuple[str, ...]]) -> tuple[Left, list[str]]:
    """Run a program by python and by `launch`; return what python left, and say what is different."""
    for _ in range(3):  # gloo may abort a plain python at its end , which `process_groups` prevents in ranks
        alone = forget_folder(run_alone(program.case, program.write(folder / "python")), folder / "python")
        if alone.code != 128 + signal.SIGABRT:
            break
    expected = read_files(folder / "python")
    found = []
    for way, words in ways.items():
        work = program.write(folder / way)
        ran = forget_folder(make_launch("agent=direct", *words, *program.settings)(program.case, work), work)
        notices = [line for line in ran.said.splitlines() if "not forked" in line or "by itself" in line]
        found += find_differences(f"{program.case.name}, {way}", (alone, expected), (ran, read_files(work)))
        if way == "forked" and (program.exec not in "".join(notices) or bool(notices) != bool(program.exec)):
            found.append(f"{program.case.name}: told {notices}, expected {program.exec!r}")
    return (alone, expected), found


def find_differences(name: str, expected: Left, found: Left) -> list[str]:
    """Say what is different between two runs."""
    (alone, files), (ran, others) = expected, found
    differences = [f"{name}: exit code {ran.code}, not {alone.code}: {ran.said}"] * (ran.code != alone.code)
    if ran.texts != alone.texts:
        differences.append(f"{name}: printed\n{ran.texts}\nnot\n{alone.texts}")
    changed = sorted(path for path in {*files, *others} if files.get(path) != others.get(path))
    return differences + [
        f"{name}: {path} is {others.get(path)!r}, not {files.get(path)!r}" for path in changed
    ]


@pytest.mark.parametrize("name", SMOKE)
def test_a_program_leaves_in_a_forked_rank_what_it_leaves_by_python(name: str, tmp_path: Path) -> None:
    assert compare(PROGRAMS[name], tmp_path, {"forked": WAYS["forked"]})[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(NAMES), GROUP))
def test_programs_run_as_by_python_and_torchrun(first: int, tmp_path: Path) -> None:
    """A forked rank beside python, for all; an executed one and torchrun's too, for one in five."""
    programs = [PROGRAMS[name] for name in NAMES[first : first + GROUP]]
    folders = [tmp_path / str(number) for number in range(len(programs))]
    in_all_ways = first % (5 * GROUP) == 0
    ways = WAYS if in_all_ways else {"forked": WAYS["forked"]}
    with ThreadPoolExecutor(2) as pool:
        compared = list(pool.map(compare, programs, folders, [ways] * len(programs)))
    differences = [line for _, lines in compared for line in lines]
    if not in_all_ways:
        assert differences == []
        return
    peers = run_by_torchrun(programs, tmp_path / "torchrun")
    for program, alone, peer in zip(programs, (alone for alone, _ in compared), peers, strict=True):
        differences += find_differences(f"{program.case.name}, torchrun", alone, peer)
    assert differences == []


@pytest.mark.parametrize("setting", ["start.warm=off", "start.warm=auto"])
@pytest.mark.parametrize("words", [("interpreter.py", "a", "--b=c", ""), ("own_launcher.py",)], ids=str)
@pytest.mark.slow
def test_a_program_finds_its_interpreter_as_by_itself(
    words: tuple[str, ...], setting: str, tmp_path: Path
) -> None:
    """Its argv, `__main__`, streams, signals, threads, filters of warnings, the collector, its end, …"""
    work = copy_programs(tmp_path)
    case = Case("the interpreter", words)
    alone, ran = run_alone(case, work), make_launch("agent=direct", setting)(case, work)
    assert not describe_difference(alone, ran)
    assert "launch-rank: " in ran.said
    assert "by itself" not in ran.said and "not forked" not in ran.said, ran.said
