"""Every command of the documents does something: plans, help and the like run, a job is a dry run."""

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.make_runs import make_run, write_log
from tests.data_files import prepare
from tests.docs.generate import DOCUMENTS, ROOT, list_blocks, list_code, name_document
from tests.seam import clean_environ, enter, run_inside

VERBS = {"fit", "plan", "topo", "doctor", "tune", "status", "logs", "watch", "report", "cancel", "nodes"}
KNOWN: dict[str, Any] = tomllib.loads(Path(__file__).with_name("commands.toml").read_text())


@dataclass(frozen=True, slots=True)
class Shown:
    """A command of a document."""

    document: str
    text: str
    environ: tuple[str, ...]
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {self.text}"


def list_shown() -> list[Shown]:
    """All commands of the documents that start `launch` or `launch-rank`, each once."""
    found: dict[tuple[str, ...], Shown] = {}
    for path in DOCUMENTS:
        for text in list_texts(path.read_text(encoding="utf-8")):
            words = shlex.split(text, comments=True)
            words = words[: next((at for at, word in enumerate(words) if word in {"|", ">"}), len(words))]
            names = [word for word in words if re.match(r"[A-Z_]+=", word)]
            argv = tuple(words[len(names) :]) if words[: len(names)] == names else ()
            if argv and (argv[0] == "launch" or "launch-rank" in argv):
                found.setdefault(
                    (*names, *argv), Shown(name_document(path), shlex.join(argv), tuple(names), argv)
                )
    return list(found.values())


def list_texts(text: str) -> Iterator[str]:
    """Lines of code blocks that are whole commands, and commands in backticks."""
    for block in list_blocks(text):
        for line in block.replace("\\\n", "").splitlines():
            command = line.removeprefix("$ ").strip()
            if re.match(
                r"([A-Z_]+=\S+ )*(launch|torchrun|srun|mpirun|mpiexec|accelerate|deepspeed) ", command
            ):
                yield command
    for code in list_code(text):
        command = code.removeprefix("!")
        if re.match(r"([A-Z_]+=\S+ )*launch \S+ ", command) and command.isascii():
            yield command


SHOWN = list_shown()
OF_LAUNCH = [shown for shown in SHOWN if "launch-rank" not in shown.argv]
OF_LAUNCH_RANK = [shown for shown in SHOWN if "launch-rank" in shown.argv]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the documents' commands name: programs, variables, configuration, a snapshot."""
    found = tmp_path_factory.mktemp("docs")
    snapshot = (ROOT / "conf/machine/dgx_a100.json").read_bytes()
    for name in ("llama7b", "train"):
        run = make_run(
            found / "runs", name, "20261121-072911", hosts=["n0", "n1", "n2", "n3"], slurm={"job_id": "4711"}
        )
        for rank in range(4):
            write_log(run, rank, "step 1\n")
    with pytest.MonkeyPatch.context() as patch:
        prepare(KNOWN, found, patch)
        for name in ("node.json", "conf/machine/ours.json"):
            (found / name).write_bytes(snapshot)
        enter(found, patch)
        yield found


def make_dry(argv: Sequence[str]) -> list[str]:
    """A command line of a job or of `tune` with `dry_run=true`, others as they are."""
    words = [KNOWN["names"].get(word, word) for word in argv]
    is_job = not words or words[0] not in VERBS
    if is_job and not {"--help", "--help-all", "--cfg", "--version", "-sc"} & set(words):
        return ["dry_run=true", *words]
    if words and words[0] == "fit":
        return ["fit", "dry_run=true", *words[1:]]
    return [*words[:2], "dry_run=true", "yes=true", *words[2:]] if words[0] == "tune" else words


@pytest.mark.parametrize("shown", OF_LAUNCH, ids=str)
def test_a_command_of_launch_works(shown: Shown, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in shown.environ:
        monkeypatch.setenv(*variable.split("=", 1))
    argv = list(shown.argv[1:])
    text = " ".join(shown.argv)
    if text in KNOWN["not_run"]:
        argv = ["--cfg", "job", *(word for word in argv if word not in VERBS)]
    done = run_inside(make_dry(argv))
    if text in KNOWN["refused"]:
        assert KNOWN["refused"][text] in done.err
    else:
        assert done.code == 0, done.err


@pytest.mark.parametrize("shown", OF_LAUNCH_RANK, ids=str)
def test_a_command_of_launch_rank_works(shown: Shown, folder: Path) -> None:
    """What starts the ranks is left out: its part is in the job scripts, which the tests on SLURM run."""
    after = shown.argv[shown.argv.index("launch-rank") + 1 :]
    environ = dict(text.split("=", 1) for text in shown.environ)
    environ |= clean_environ() | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RANK": "0"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    command = [sys.executable, "-m", "launcher.rank", *after]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "launch-rank" in done.stderr or "--help" in after


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_document)
def test_a_target_of_make_exists(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    code = [*list_code(text), *"\n".join(list_blocks(text)).splitlines()]
    named = {found[1] for line in code if (found := re.match(r"make ([\w-]+)", line.strip()))}
    assert named <= targets
