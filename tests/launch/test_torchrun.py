"""torchrun's command line, as its own parser reads it, and torchrun started before that is known."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.launch.agent import PreloadedAgent, TorchrunAgent, preload_agent
from launcher.launch.job import render_torchrun
from tests.seam import clean_environ, run_outside

OPTIONS = {
    "nnodes": "1:1",
    "max_restarts": None,
    "monitor_interval": 0.5,
    "rdzv_conf": {"a": 1, "b": "x y"},
    "other": {},
}


def parse(command: tuple[str, ...]) -> Namespace:
    """Read a command line by the installed torch's parser."""
    from torch.distributed.run import parse_args

    parse_words: Callable[[list[str]], Namespace] = parse_args
    assert command[1:4] == ("-P", "-m", "torch.distributed.run")
    return parse_words(list(command[4:]))


@pytest.fixture(scope="module")
def abbreviations() -> list[str]:
    """What may be short for an option of torchrun's, and the options themselves."""
    from torch.distributed.run import get_args_parser

    make_parser: Callable[[], object] = get_args_parser
    names: list[str] = list(vars(make_parser())["_option_string_actions"])
    return sorted({name[:size] for name in names for size in range(1, len(name) + 1)})


def test_torchrun_itself_reads_its_options_from_its_command_line() -> None:
    assert render_torchrun("py", OPTIONS, ("shim",), ("prog", "a b", "--x", "", "é\n")) == (
        *("py", "-P", "-m", "torch.distributed.run"),
        *("--nnodes=1:1", "--monitor-interval=0.5", "--rdzv-conf=a=1,b=x y", "--no-python", "--"),
        *("shim", "prog", "a b", "--x", "", "é\n"),
    )
    parsed = parse(render_torchrun("py", {**OPTIONS, "nproc_per_node": 2, "max_restarts": 3}, ("shim",), ()))
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("1:1", "2", 3)
    assert (parsed.monitor_interval, parsed.rdzv_conf, parsed.no_python) == (0.5, "a=1,b=x y", True)
    assert (parsed.training_script, parsed.training_script_args) == ("shim", [])


@given(st.data())
@example(None)
def test_the_programs_words_are_the_programs(abbreviations: list[str], data: st.DataObject | None) -> None:
    short = st.sampled_from(abbreviations)
    valued = st.builds("{}={}".format, short, st.text())
    word = short | valued | st.sampled_from(["--", "", "-", "a"]) | st.text()
    program = data.draw(st.lists(word, max_size=6)) if data else [*abbreviations, "--", "--log=x", "--", ""]
    parsed = parse(render_torchrun("py", OPTIONS, ("py", "-I", "shim"), ("prog", *program)))
    assert [parsed.training_script, *parsed.training_script_args] == ["py", "-I", "shim", "prog", *program]
    assert (parsed.nnodes, parsed.nproc_per_node) == ("1:1", "1")


def test_a_program_gets_them_through_launch(tmp_path: Path) -> None:
    program = "import os, sys\nopen('words', 'wb').write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    (tmp_path / "save.py").write_text(program)
    words = ["--log=x", "--max=1", "--run=a", "--n", "--", "a", "--", "b", "", "--nnodes=9", "-m", "é\n"]
    words += ["\udcff"]
    done = run_outside(["nproc_per_node=1", "--", sys.executable, "save.py", *words], tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "words").read_bytes() == b"\0".join(map(os.fsencode, words))


TORCHRUN = """
import json, os, subprocess, sys
def main():
    files = sorted(map(int, os.listdir("/proc/self/fd")))
    print(json.dumps([sys.argv, os.environ.get("OWN"), os.path.samefile(0, os.devnull), files]), flush=True)
    for word in ("exit 0", "exit 3", "kill -TERM $$"):
        print(subprocess.Popen(["sh", "-c", word]).wait(10), flush=True)
    waited = subprocess.Popen(["true"])
    while waited.poll() is None:
        pass
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
    log.write_text("launch-agent: process 1 ended with 5\n")  # of an earlier start
    environ = {**clean_environ(), "PYTHONPATH": str(folder), "OWN": "1"}
    return preload_agent(sys.executable, environ, log), log


def test_a_preloaded_agent_gets_its_words_and_tells_of_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("json.py", "random.py", "torch.py"):  # which it does not import
        (folder / name).write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(folder)
    preloaded, log = preload(tmp_path)
    assert preloaded.process.poll() is None, "it waits for its words"
    words = ["--nnodes=2:2", "--no-python", "pro gram", "-m", 'é $(x)\n"' + "long" * 50000]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    agent = TorchrunAgent(lambda: preloaded.begin(command), log, lambda _: ())
    agent.begin()
    assert agent.process.wait(60) == 0, log.read_text()
    argv, own, reads_nothing, files = json.loads(log.read_text().splitlines()[1])
    assert argv == ["torch.distributed.run", *words]
    assert (own, reads_nothing) == ("1", True)
    assert files[:3] == [0, 1, 2] and len(files) == 4, "the listing's own, and no pipe"
    exits = agent.read_exits()
    assert sorted(exits.values()) == [-15, 0, 0, 3] and 1 not in exits
    assert "\n0\n" in log.read_text() and "\n-15\n" in log.read_text(), "they end as they did"
    log.unlink()
    assert agent.read_exits() == {} and not agent.was_signalled()


def test_a_preloaded_agent_that_cannot_go_on_ends(tmp_path: Path) -> None:
    agent, log = preload(tmp_path / "unwanted")
    os.close(agent.pipe)
    assert agent.process.wait(30) == 1 and log.read_text().count("\n") == 1
    agent, log = preload(tmp_path / "broken", "raise ImportError('libcudart.so.12')")
    assert agent.process.wait(30) == 1
    assert agent.begin([sys.executable, "-m", "torch.distributed.run"]).returncode == 1
    assert "ImportError: libcudart.so.12" in log.read_text()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        preload_agent("/no/such/python", {}, log)
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "no descriptor is left"
