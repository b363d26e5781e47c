"""The program as it is started: by torchrun, by itself, resumed, and signalled."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.inprocess.hooked import WITHOUT_COMPILER
from tests.seam import PATIENCE

from .start_program import Start, read_losses, read_steps


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Give a way to start the program on a short text."""
    text = tmp_path_factory.mktemp("programs") / "text.txt"
    text.write_bytes(b"".join(b"%d squared is %d; " % (n, n * n) for n in range(2000)))
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_"))}
    return Start(environ | {"OMP_NUM_THREADS": "1"}, text)


def list_saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SCHEDULE: dict[str, str | bool] = {"steps": "12", "warmup_steps": "4", "lr": "0.008"}
MIXED: dict[str, str | bool] = {
    "parallel": "fsdp",
    "dtype": "bf16",
    "activation_checkpointing": "full",
    "batch_size": "2",
    "grad_accumulation": "2",
}
"""Other ways to compute the same global batch."""

CUT_OFF = re.compile(
    r"(?:\[rank0\]: Traceback [^\n]*\n(?:\[rank0\]:   [^\n]*\n)*"
    r"\[rank0\]: (?:ConnectionResetError|BrokenPipeError|EOFError)[^\n]*\n)*"
)
"""Nothing, or what Python prints in workers that were giving the rank a batch as it died."""
WITHOUT_WATCHDOG = """
import torch.utils.data._utils.worker
torch.utils.data._utils.worker.ManagerWatchdog.is_alive = lambda _: True
"""


@pytest.fixture(scope="module")
def quick(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """The same with no compiler, whose import takes longer than a few steps, and no watchdog of torch's.

    That ends workers some seconds after their rank; here the program's own way has to do it.
    """
    program = tmp_path_factory.mktemp("quick") / "train.py"
    program.write_text(
        f"{WITHOUT_COMPILER}{WITHOUT_WATCHDOG}from launcher.programs.train import main\nmain()\n"
    )
    return replace(start, program=(str(program),))


@pytest.fixture(scope="module")
def ddp(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Give the output and the checkpoints of 12 steps of two ranks under DDP."""
    folder = tmp_path_factory.mktemp("ddp")
    return start.run(2, checkpoint_every="4", checkpoint_dir=str(folder), **SCHEDULE), folder


def copy_until(folder: Path, step: int, target: Path) -> str:
    """Copy the checkpoint of a step, as if the run had been killed before the next."""
    name = f"step-{step:08}"
    shutil.copytree(folder / name, target / name)
    return str(target)


def test_the_output_has_its_form_and_the_loss_falls(ddp: tuple[str, Path]) -> None:
    output, folder = ddp
    losses = read_losses(output)
    assert list(losses) == list(range(1, 13))
    assert float(losses[12]) < float(losses[1]) - 0.3
    assert "2 ranks, ddp over gloo, fp32" in output
    assert f"done step 12/12 loss {losses[12]} val_loss " in output.splitlines()[-1]
    # MFU counts what the model needs, TFLOPS what is computed: the same without recomputation.
    tflops, mfu = read_steps(output)[0].group(6, 7)
    assert float(mfu) == pytest.approx(float(tflops) / 0.1 * 100, abs=0.06)
    assert list_saved(folder) == ["step-00000008", "step-00000012"], "two are kept, and no part of one"
    rates = [float(found[4]) for found in read_steps(output)]
    assert rates[:4] == [0.002, 0.004, 0.006, 0.008], "warm-up"
    assert rates[7] == pytest.approx(0.0044) and rates[3:] == sorted(rates[3:], reverse=True), "a cosine"
    assert rates[-1] == pytest.approx(0.0008), "min_lr_ratio"


def expect_same(whole: str, resumed: str, first: int) -> None:
    """Compare a run with one that was resumed before step `first`: every digit printed is the same."""
    losses = read_losses(whole)
    assert read_losses(resumed) == {step: losses[step] for step in range(first, 13)}
    assert f"start   at step {first - 1}, resumed from " in resumed
    endings = [output.splitlines()[-1].split(" seconds")[0] for output in (whole, resumed)]
    assert endings[0] == endings[1]


def expect_near(whole: dict[int, str], resumed: dict[int, str], near: float) -> None:
    """Compare two ways to compute the same sums from step 9 on: equal but for rounding."""
    assert list(resumed) == [9, 10, 11, 12]
    assert [float(loss) for loss in resumed.values()] == pytest.approx(
        [float(whole[step]) for step in resumed], abs=near
    )


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(start: Start, ddp: tuple[str, Path], tmp_path: Path) -> None:
    part = copy_until(ddp[1], 8, tmp_path)
    expect_same(ddp[0], start.run(2, checkpoint_dir=part, num_workers="1", **SCHEDULE), first=9)


@pytest.mark.slow
def test_fsdp_goes_on_from_ddp_and_then_exactly(start: Start, ddp: tuple[str, Path], tmp_path: Path) -> None:
    part = copy_until(ddp[1], 8, tmp_path / "fsdp")
    whole = start.run(2, checkpoint_dir=part, checkpoint_every="2", peak_tflops="0.0001", **SCHEDULE, **MIXED)
    assert "fsdp over gloo, bf16" in whole
    tflops, mfu = read_steps(whole)[0].group(6, 7)
    again = float(tflops) / 0.0001 * 100 / float(mfu)
    assert again == pytest.approx(1.2, rel=0.01), "activations are computed again, logits are not"
    expect_near(read_losses(ddp[0]), read_losses(whole), near=0.02)
    part = copy_until(tmp_path / "fsdp", 10, tmp_path / "again")
    expect_same(whole, start.run(2, checkpoint_dir=part, **SCHEDULE, **MIXED), first=11)


@pytest.mark.slow
def test_one_process_goes_on_from_two(start: Start, ddp: tuple[str, Path], tmp_path: Path) -> None:
    part = copy_until(ddp[1], 8, tmp_path)
    alone = start.run(0, checkpoint_dir=part, grad_accumulation="2", **SCHEDULE)
    assert " 1 rank, fp32" in alone
    expect_near(read_losses(ddp[0]), read_losses(alone), near=0.0003)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read lines of output up to one that has the text."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"no {text!r} before the end: {process.communicate()[1]}")


def find_ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Give torchrun's ranks, in the order in which it started them."""
    return sorted(psutil.Process(process.pid).children(), key=lambda child: (child.create_time(), child.pid))


@pytest.mark.slow
def test_a_signal_to_one_rank_makes_all_save_the_same_step(start: Start, tmp_path: Path) -> None:
    process = start.popen(
        2, steps="3000", checkpoint_every="0", checkpoint_dir=str(tmp_path), num_workers="1"
    )
    read_until(process, "step 3/")
    ranks = find_ranks(process)
    everything = psutil.Process(process.pid).children(recursive=True)
    ranks[1].send_signal(signal.SIGUSR2)
    saved = read_until(process, "on SIGUSR2")
    step = int(saved.split()[2])
    read_until(process, f"step {step + 2}/")
    os.killpg(ranks[0].pid, signal.SIGTERM)  # as torchrun does: its DataLoader workers too
    stopped = read_until(process, "on SIGTERM")
    _, errors = process.communicate(timeout=PATIENCE)
    assert "exitcode  : 75 " in errors and "exitcode  : -" not in errors  # torchrun names the ranks' ends
    assert "train.py" not in errors
    names = [f"step-{int(line.split()[2]):08}" for line in (saved, stopped)]
    assert list_saved(tmp_path) == names
    assert not psutil.wait_procs(everything, timeout=PATIENCE)[1]


@pytest.mark.slow
def test_a_process_that_has_saved_its_state_asks_for_another_start(start: Start, tmp_path: Path) -> None:
    process = start.popen(0, steps="3000", checkpoint_every="0", checkpoint_dir=str(tmp_path))
    read_until(process, "step 2/")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (os.EX_TEMPFAIL, "")
    assert "on SIGTERM" in output and len(list_saved(tmp_path)) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_process_without_checkpoints_dies_by_its_signal_and_leaves_no_worker(
    quick: Start, number: signal.Signals
) -> None:
    """An empty folder for checkpoints is none."""
    process = quick.popen(0, steps="3000", num_workers="2", checkpoint_every="1", checkpoint_dir="")
    read_until(process, "step 2/")
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) == 2
    process.send_signal(signal.SIGUSR2)  # there is nothing to save to
    read_until(process, "step 4/")
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == -number and CUT_OFF.fullmatch(errors), errors
    assert not psutil.wait_procs(workers, timeout=PATIENCE)[1]
    assert not list(Path.cwd().glob("step-*"))


def test_a_mistake_found_late_is_one_line_and_an_unfinished_checkpoint_is_removed(
    start: Start, tmp_path: Path
) -> None:
    for name, saved in (("step-00000004", {}), ("step-00000008", {"layers": 3}), ("step-00000012.part", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.json").write_text(json.dumps(saved))
    with start.popen(0, checkpoint_dir=str(tmp_path)) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert errors.startswith(f"train: error: {tmp_path}/step-00000008 is of a model with ")
    assert "layers=3" in errors and errors.count("\n") == 1
    assert list_saved(tmp_path) == ["step-00000004", "step-00000008"]


@pytest.mark.slow
def test_a_cpu_has_no_mfu(start: Start) -> None:
    command = [word for word in start.command(0, steps="1") if not word.startswith("--peak-tflops")]
    done = subprocess.run(
        command, env=start.environ, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert " tflops " in done.stdout and "mfu" not in done.stdout and "peak" not in done.stdout


@pytest.mark.slow
def test_compiled_blocks_that_keep_products_train_alike(start: Start) -> None:
    """torch.compile with selective checkpointing: half a minute of compilation."""
    if not shutil.which("g++"):
        pytest.skip("torch.compile has no C++ compiler here (g++)")
    plain, compiled = (
        read_losses(start.run(0, steps="2", activation_checkpointing="selective", eval_batches="0", **more))
        for more in ({}, {"compile": True})
    )
    assert len(plain) == 2
    assert [float(loss) for loss in compiled.values()] == pytest.approx(
        list(map(float, plain.values())), 1e-3
    )


@pytest.mark.slow
def test_ranks_with_different_settings_take_those_of_rank_0(start: Start) -> None:
    """Nodes of several kinds: each was given what fits there, and counted micro-steps for its own number of
    GPUs on each node."""
    other: dict[str, str | bool] = {"batch_size": "4", "grad_accumulation": "3", "parallel": "ddp"}
    first: dict[str, str | bool] = {"batch_size": "2", "parallel": "fsdp"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    started = [
        replace(start, environ=start.environ | environ | {"MASTER_PORT": port, "RANK": str(rank)}).popen(
            0, steps="2", activation_checkpointing=recompute, global_batch="8", **options
        )
        for rank, recompute, options in ((0, "full", first), (1, "selective", other))
    ]
    try:
        output, errors = started[0].communicate(timeout=PATIENCE)
        ends = [started[0].returncode, started[1].wait(PATIENCE)]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert ends == [0, 0], output + errors
    assert "2 sequences x 32 x 2 ranks x 2 micro-steps" in output
    assert "fsdp over gloo" in output
