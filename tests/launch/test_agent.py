"""An agent that is started before its command line is known."""

import json
import os
import sys
from pathlib import Path

import pytest

from launcher.launch.agent import PreloadedAgent, TorchrunAgent, preload_agent
from tests.seam import clean_environ

TORCHRUN = """
import json, os, sys
def main():
    files = sorted(map(int, os.listdir("/proc/self/fd")))
    print(json.dumps([sys.argv, os.environ.get("OWN"), os.path.samefile(0, os.devnull), files]))
"""


def preload(folder: Path, torchrun: str = TORCHRUN) -> tuple[PreloadedAgent, Path]:
    """An agent with a torch of the test's own, which tells what it was started with."""
    module = folder / "torch" / "distributed" / "run.py"
    module.parent.mkdir(parents=True)
    for package in (module.parent, module.parent.parent):
        (package / "__init__.py").touch()
    module.write_text(torchrun)
    (folder / "logs").mkdir()
    log = folder / "logs" / "agent-n0.log"
    environ = {**clean_environ(), "PYTHONPATH": str(folder), "OWN": "1"}
    return preload_agent(sys.executable, environ, log), log


def test_it_gets_its_words_environment_and_nothing_else(tmp_path: Path) -> None:
    agent, log = preload(tmp_path)
    assert agent.process.poll() is None, "it waits for its words"
    words = ["--nnodes=2:2", "--no-python", "pro gram", "-m", 'é $(x)\n"' + "long" * 50000]
    process = agent.begin([sys.executable, "-m", "torch.distributed.run", *words])
    assert process.wait(30) == 0, log.read_text()
    argv, own, reads_nothing, files = json.loads(log.read_text())
    assert argv == ["torch.distributed.run", *words]
    assert (own, reads_nothing) == ("1", True)
    assert files[:3] == [0, 1, 2] and len(files) == 4, "the listing's own, and no pipe"


CHILDREN = """
import subprocess, sys
def main():
    for word in ("exit 0", "exit 3", "kill -TERM $$"):
        print(subprocess.Popen(["sh", "-c", word]).wait(10), flush=True)
    waited = subprocess.Popen(["true"])
    while waited.poll() is None:
        pass
"""


def test_it_tells_what_its_children_ended_with(tmp_path: Path) -> None:
    preloaded, log = preload(tmp_path, CHILDREN)
    log.write_text("launch-agent: process 1 ended with 5\n")  # of an earlier start
    command = [sys.executable, "-m", "torch.distributed.run"]
    agent = TorchrunAgent(lambda: preloaded.begin(command), log, lambda _: ())
    agent.begin()
    assert agent.process.wait(60) == 0, log.read_text()
    exits = agent.read_exits()
    assert sorted(exits.values()) == [-15, 0, 0, 3] and 1 not in exits
    assert "\n0\n" in log.read_text() and "\n-15\n" in log.read_text(), "they end as they did"
    log.unlink()
    assert agent.read_exits() == {} and not agent.was_signalled()


def test_files_in_the_working_directory_do_not_shadow_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("json.py", "random.py", "torch.py"):
        (folder / name).write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(folder)
    agent, log = preload(tmp_path)
    assert agent.begin([sys.executable, "-m", "torch.distributed.run"]).wait(30) == 0, log.read_text()


def test_it_ends_where_nobody_wants_it_any_more(tmp_path: Path) -> None:
    agent, log = preload(tmp_path)
    os.close(agent.pipe)
    assert agent.process.wait(30) == 1
    assert log.read_text() == ""


def test_one_that_cannot_import_torch_tells_so_in_its_log(tmp_path: Path) -> None:
    agent, log = preload(tmp_path, "raise ImportError('libcudart.so.12')")
    assert agent.process.wait(30) == 1
    assert agent.begin([sys.executable, "-m", "torch.distributed.run"]).returncode == 1
    assert "ImportError: libcudart.so.12" in log.read_text()


def test_one_that_cannot_be_started_leaves_no_descriptor(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    (tmp_path / "logs").mkdir()
    with pytest.raises(FileNotFoundError):
        preload_agent("/no/such/python", {}, tmp_path / "logs" / "agent-n0.log")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
