"""What a program prints arrives as it is, in files and pipes: every byte, at once, and prefixes alone."""

import os
import subprocess
from pathlib import Path

import pytest

from launcher.launch.job import STARTING
from tests.seam import LAUNCH, run_to_end, start, wait_for, write_program

LONG = 8 << 20
ANYTHING = f"""
import os
lines = "".join(f"line {{number}}\\n" for number in range(20_000)).encode()
anything = b"0123456789" * {LONG // 10} + b"\\n" + bytes(range(256)) * 12288
os.write(1, (lines if os.environ["RANK"] == "1" else anything) + b"no end")
os.write(2, b"\\xff error\\n")
"""
"""Each at once: of several ranks, a line that is not whole after a second is shown as it is."""
WHOLE = b"0123456789" * (LONG // 10) + b"\n" + bytes(range(256)) * 12288 + b"no end"


@pytest.mark.usefixtures("quick_agent")
def test_one_ranks_output_is_its_bytes(tmp_path: Path) -> None:
    run_to_end(tmp_path, ANYTHING, "nproc_per_node=1")
    assert (tmp_path / "stdout").read_bytes() == WHOLE
    assert b"\n\xff error\nlaunch: succeeded" in (tmp_path / "stderr").read_bytes()


@pytest.mark.parametrize(("mode", "told"), [("rank0", 1), ("none", 0)])
def test_after_the_table_a_line_tells_that_the_ranks_are_starting(
    tmp_path: Path, mode: str, told: int
) -> None:
    """Importing torch takes seconds, in which a terminal would show nothing."""
    job = run_to_end(tmp_path, "import time\ntime.sleep(1)", "nproc_per_node=1", f"logs.console={mode}")
    lines = job.read().splitlines()
    found = [at for at, line in enumerate(lines) if line == f"launch: {STARTING}"]
    assert len(found) == told and all(at > 1 for at in found)


@pytest.mark.usefixtures("quick_agent")
def test_several_ranks_output_has_a_prefix_at_each_lines_start_and_nothing_else(tmp_path: Path) -> None:
    run_to_end(tmp_path, ANYTHING, "nproc_per_node=2", "logs.console=all")
    prefixes = [f"[{os.uname().nodename}:{rank}] ".encode() for rank in (0, 1)]
    lines = (tmp_path / "stdout").read_bytes().split(b"\n")
    assert all(line.startswith(tuple(prefixes)) for line in lines)
    shown = [[line.removeprefix(p) for line in lines if line.startswith(p)] for p in prefixes]
    assert b"\n".join(shown[0]) == WHOLE
    assert shown[1] == [b"line %d" % number for number in range(20_000)] + [b"no end"]


ASKING = """
import os, time
from pathlib import Path
print(end=f"rank {os.environ['RANK']}? ", flush=True)
while not Path("answer").exists():
    time.sleep(0.02)
print("yes")
"""


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_is_seen_in_a_file_before_its_line_has_an_end(tmp_path: Path, ranks: int) -> None:
    words = (f"nproc_per_node={ranks}", "logs.console=rank0", "--", write_program(tmp_path, ASKING))
    prefix = f"[{os.uname().nodename}:0] " if ranks > 1 else ""
    with start(tmp_path, *words) as started:
        wait_for(lambda: started.read("stdout") == f"{prefix}rank 0? ", "the prompt")
        (tmp_path / "answer").touch()
        assert started.wait() == 0
    assert started.read("stdout") == f"{prefix}rank 0? yes\n"


@pytest.mark.usefixtures("quick_agent")
def test_stdout_that_is_closed_is_not_taken_for_another_file(tmp_path: Path) -> None:
    program = write_program(tmp_path, "print('hello')")
    words = f'exec "$@" >&- 2>{tmp_path}/errors'
    done = subprocess.run(
        ["sh", "-c", words, "sh", *LAUNCH, "nproc_per_node=1", "--", program], cwd=tmp_path, check=False
    )
    assert done.returncode == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "program.py"]
    assert [path.name for path in files if b"hello" in path.read_bytes()] == ["rank-0.out"]
