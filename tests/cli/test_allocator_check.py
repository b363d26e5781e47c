"""The allocator's settings on the command line: refused, doubted, or left out before anything starts."""

from pathlib import Path

import pytest

from launcher.cli import job_warnings
from launcher.probe import health
from tests.seam import Launch, run_outside
from tests.specify import specify

RUN = ("nproc_per_node=1", "dry_run=true")


def test_programs_that_share_gpu_memory_are_warned_of_in_a_container(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("nodes=2", "cluster=slurm", "dry_run=true", "--", "python", "-m", "verl.trainer.main_ppo")
    monkeypatch.setattr(job_warnings, "CONTAINER_MARKS", ())
    assert "165685" not in launch(*words).err
    contained = launch("cluster.container.image=a.sif", *words)
    assert contained.code == 0
    assert "pytorch/issues/165685" in contained.err and "--cap-add=SYS_PTRACE to have both" in contained.err


def test_a_container_that_may_trace_is_as_good_as_none(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*RUN, "--", "echo", "verl.trainer")
    monkeypatch.setattr(job_warnings, "CONTAINER_MARKS", ("/",))
    for capabilities in (0, 1 << 19):
        monkeypatch.setattr(health, "read_capabilities", lambda _, found=capabilities: found)
        assert ("165685" in launch(*words).err) == (capabilities == 0)


def test_what_is_left_out_is_not_in_the_configuration(here: Path) -> None:
    """So it does not go to the nodes of a submitted job either."""
    (here / "train.py").touch()
    for words, left in ((["--use-nccl-ub"], {}), ([], {"expandable_segments": True})):
        config = specify([], ("train.py", *words), {}).config
        assert config.allocator == {**left, "host": "system"}


@pytest.mark.usefixtures("quick_agent")
def test_a_program_that_was_told_of_a_conflict_runs(here: Path) -> None:
    (here / "train.py").write_text("pass")
    words = ["nproc_per_node=1", "new_run_dir=run", "--", "train.py", "--use-nccl-ub"]
    done = run_outside(words, here, {"CUDA_VISIBLE_DEVICES": ""}, timeout=120)
    assert done.code == 0, done.err
    assert done.err.count("--use-nccl-ub: Megatron-LM refuses") == 1
