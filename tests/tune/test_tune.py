"""`launch tune`: what a trial says, and real ranks, real workers, real allocations that fail."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import launcher.inprocess
from launcher.errors import UsageError
from launcher.probe import limits
from launcher.tune.search import BatchSearch, WorkersSearch
from launcher.tune.trials import Trial, find_memory_error
from tests import seam
from tests.cli.make_runs import read_manifest
from tests.inprocess.hooked import WITHOUT_COMPILER
from tests.seam import Launch, clean_environ, find_working_in, run_outside, wait_for, write_program

TEXTS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
LOADING, _TRAINING, _ALONE, BATCHES, STUBBORN, ENDING, FULL = (
    TEXTS[name].replace("WITHOUT_COMPILER", WITHOUT_COMPILER)
    for name in ("loading", "training", "alone", "batches", "stubborn", "ending", "full")
)
TRAINING, ALONE = LOADING + _TRAINING, LOADING + _ALONE


# What the ranks' records say


class Records:
    """Makes the records that the ranks of a trial leave, and has them measured."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, *ranks: Mapping[str, Any]) -> None:
        for path in self.folder.glob("rank-*.json"):
            path.unlink()
        loader = {"workers": 2, "iterable": False, "batches": 9}
        usual = {"unit": "step", "steps": 10, "first": 4, "times": [1.0] * 5, "waits": [0.5] * 5}
        usual |= {"loaders": [loader], "memory_kib": 7, "ended": False}
        for rank, more in enumerate(ranks):
            record = {"rank": rank, **usual, **more}
            record["loaders"] = [{**loader, **each} for each in record["loaders"]]
            (self.folder / f"rank-{rank}.json").write_text(json.dumps(record))

    def workers(self, *ranks: Mapping[str, Any], value: int = 2) -> Trial:
        self.write(*ranks)
        return WorkersSearch(9, 48).measure(self.folder, value, max(1, len(ranks)))

    def batch(self, *ranks: Mapping[str, Any], value: int = 4) -> Trial:
        self.write(*ranks)
        return BatchSearch("--b", 8, 4096, 0, 60, 900).measure(self.folder, value, len(ranks))


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path)


def test_a_trial_is_as_slow_as_its_slowest_rank_and_waits_for_each(records: Records) -> None:
    waits = [[0.5, 0.0, 0.5, 0.0, 0.0], [0.0, 0.5, 0.0, 0.5, 0.0]]
    trial = records.workers(*({"waits": each} for each in waits))
    assert (trial.rate, trial.wait, trial.memory_kib, trial.steps) == (1.0, 0.4, 14, 10)
    own = {"loaders": [{"iterable": True}]}  # an IterableDataset that takes the number
    assert records.workers(own).rate == 1.0
    apart = records.workers({"waits": waits[0]}, {"first": 100, "waits": [0.2] * 5})
    assert apart.wait == pytest.approx(0.2)


def test_what_says_nothing_is_told(records: Records) -> None:
    for ranks, part in (
        ([{"loaders": []}], "nothing to tune"),
        ([{"loaders": [{"workers": 4}]}], "num_workers=4 itself"),
        ([{"loaders": [{"workers": 0, "iterable": True}]}], "IterableDataset"),
        ([{"times": [1.0], "waits": [0.0], "steps": 5}], "ended after 5 steps"),
        ([{"times": [], "waits": [], "steps": 1, "first": None, "unit": "batch"}], "1 batch"),
        ([{}, {"times": [1.0], "waits": [0.0], "steps": 5}], "5 steps of rank 1"),
        ([{"rank": 1}], "rank 0 of 1 measured nothing"),
        ([{"steps": "many"}], "cannot be read"),
        ([], "neither an optimizer nor a DataLoader"),
    ):
        with pytest.raises(UsageError, match=part):
            records.workers(*ranks)


LINES = tomllib.loads(Path(__file__).with_name("memory_errors.toml").read_text())


def test_memory_that_ran_out_is_seen() -> None:
    for line in LINES["memory_ran_out"]:
        found = find_memory_error([*LINES["others"], line, "torch.OutOfMemoryError: a later one"])
        assert found and len(found) <= 120 and "later" not in found and "\x1b" not in found, line
    assert find_memory_error(LINES["others"]) == ""


def test_sequences_are_those_of_all_ranks_and_micro_steps(records: Records) -> None:
    """Ten loader batches of 4 in five steps of a second, on two ranks: 16 sequences a step."""
    more = {"loaders": [{"batches": 20, "batch_size": 4}], "batches": 10, "peak_kib": 100}
    uneven = {**more, "times": [0.5, 1.0, 1.5, 1.0, 1.0]}
    trial = records.batch(more, uneven)
    assert (trial.rate, trial.step_seconds, trial.memory_kib, trial.loader_batch) == (16, 1.0, 200, 4)
    assert trial.error == 0
    assert records.batch(uneven, more).rate == 16
    trial = records.batch(
        *({"gpu_total_kib": 80, "gpu_reserved_kib": 50, "gpu_other_kib": number} for number in (1, 9))
    )
    assert (trial.gpu_kib, trial.gpu_total_kib) == (59, 80), "the fullest GPU counts"
    short = {"times": [1.0], "waits": [0.0], "steps": 5, "ended": True}
    trial = records.batch(short, value=64)
    assert (trial.verdict, trial.rate) == ("fits", 0.0) and "after 5 steps" in trial.reason
    with pytest.raises(UsageError, match="after 1 step of rank 0, too few: it has too little data"):
        records.batch({**short, "steps": 1}, value=64)


# The meter in a rank's interpreter: a real torch, real workers


HOOK = str(Path(launcher.inprocess.__file__).parent)


def start(folder: Path, *words: str, **more: str) -> "subprocess.Popen[str]":
    """Start the program as the shim does for a trial of `launch tune`."""
    (folder / "alone.py").write_text(ALONE)
    (folder / "measured").mkdir(exist_ok=True)
    order = {"folder": str(folder / "measured"), "steps": 16, "seconds": 60}
    environ = {"PYTHONPATH": HOOK, "LAUNCH_METER": json.dumps(order), "RANK": "0", "WORLD_SIZE": "1", **more}
    return subprocess.Popen(
        [sys.executable, "alone.py", *words],
        cwd=folder,
        env={**clean_environ(), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def read_record(folder: Path, rank: int = 0) -> dict[str, Any]:
    """What a rank has written."""
    found: dict[str, Any] = json.loads((folder / f"measured/rank-{rank}.json").read_text())
    return found


def test_it_ends_a_program_with_workers_and_says_what_it_waited_for(tmp_path: Path) -> None:
    assert finish(start(tmp_path, "{'num_workers': 1}")) == (0, "", "")
    assert find_working_in(tmp_path) == []
    record = read_record(tmp_path)
    (loader,) = record["loaders"]
    found = record["unit"], record["ended"], loader["workers"], loader["iterable"]
    assert found == ("step", False, 1, False)
    assert record["steps"] == record["first"] + 1 + len(record["times"])
    assert 12 <= len(record["times"]) <= 20
    trial = WorkersSearch(9, 48).measure(tmp_path / "measured", 1, 1)
    assert 0 < trial.wait < 1 and 0 < trial.rate <= 1 / 0.01 * 1.01
    assert trial.memory_kib > 50_000


def test_without_an_optimizer_batches_count_and_the_end_of_a_short_program_is_its_own(tmp_path: Path) -> None:
    """What one loader reads from another is counted once."""
    inner = "{'sampler': DataLoader(range(100), batch_size=None)}"
    assert finish(start(tmp_path, inner, "eval", "7")) == (0, "the end\n", "")
    record = read_record(tmp_path)
    found = record["unit"], record["ended"], record["steps"], len(record["times"])
    assert found == ("batch", True, 8, 5)
    assert record["loaders"] == [{"workers": 0, "iterable": False, "batches": 8, "batch_size": 1}]
    assert sum(record["waits"]) < sum(record["times"])
    # A batch of the main process is 10 ms of loading to 5 of computing.
    assert WorkersSearch(9, 48).measure(tmp_path / "measured", 0, 1).wait > 0.3


def test_a_rank_that_is_done_goes_on_until_all_are(tmp_path: Path) -> None:
    quick = start(tmp_path, "{}", RANK="0", WORLD_SIZE="2", PACE="0.001")
    slow = start(tmp_path, "{}", RANK="1", WORLD_SIZE="2", PACE="0.3")
    assert finish(quick) == (0, "", "")
    assert (tmp_path / "measured/rank-1.json").exists()
    assert finish(slow) == (0, "", "")
    assert sum(read_record(tmp_path, 0)["times"]) < sum(read_record(tmp_path, 1)["times"])
    assert WorkersSearch(9, 48).measure(tmp_path / "measured", 0, 2).rate < 1 / 0.3


# The command


def use_no_memory(patch: pytest.MonkeyPatch) -> None:
    """As if all of the machine's memory had to stay free."""
    patch.setattr(limits, "LEAST_FREE", 2.0)
    patch.setattr(limits, "LEAST_FREE_KIB", 1 << 60)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_agent")
def test_two_ranks_are_tuned_and_later_runs_use_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    words = ["tune", "dataloader", "nproc_per_node=2", "tune.max_workers=3", "tune.steps=16", "format=json"]
    hostile = ["train.py", "b\nnum_workers: 99\rnum_workers: 98"]
    done = run_outside([*words, "--", *hostile], tmp_path, timeout=300)
    assert done.code == 0, done
    result = json.loads(done.out)
    chosen = result["num_workers"]
    assert chosen in (2, 3) and result["complete"] and result["saved"] == "conf/dataloader/tuned.yaml"
    trials = {trial["value"]: trial for trial in result["trials"]}
    assert trials[0]["wait"] > 0.5
    assert trials[chosen]["rate"] > 1.5 * trials[0]["rate"]
    assert f"fastest with {chosen} workers" in done.err
    assert "conf/dataloader/tuned.yaml written: `launch dataloader=tuned -- train.py" in done.err
    assert "train.py" in (tmp_path / "conf/dataloader/tuned.yaml").read_text()
    again = run_outside(["tune", "dataloader", "dry_run=true", "train.py"], tmp_path)
    assert again.code == 0, "a file of ours is replaced"
    assert find_working_in(tmp_path) == []
    (run,) = tmp_path.glob("runs/train-tune/*")
    assert read_manifest(run)["outcome"].items() >= {"state": "succeeded", "exit_code": 0}.items()
    plan = run_outside(["plan", "dataloader=tuned", "nproc_per_node=2", "format=json"], tmp_path)
    ranks = json.loads(plan.out)["ranks"]
    assert [rank["num_workers"] for rank in ranks] == [chosen] * 2
    assert {rank["env"]["LAUNCH_LOADER_DEFAULT"] for rank in ranks} == {"1"}
    for rank in (0, 1):  # ranks end together, without a word
        for trial in trials:
            err = (run / f"workers-{trial}/logs/0/rank-{rank}.err").read_text()
            assert "Traceback" not in err, err


@pytest.mark.slow
def test_ctrl_c_shows_what_was_measured_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    words = ["tune", "dataloader", "nproc_per_node=2", "tune.max_workers=3", "tune.steps=9999"]
    with seam.start(tmp_path, *words, "--", "train.py") as started:
        wait_for(lambda: "steps/s" in started.read(), "the first trial", tell=started.read)
        started.process.send_signal(signal.SIGINT)
        assert started.wait() == 130, started.read()
        assert started.survivors() == []
    assert "interrupted, and no file is written: fastest with 0 workers" in started.read()
    shown = started.read("stdout")
    assert "waiting for data" in shown and "chosen" in shown
    assert not (tmp_path / "conf").exists()
    (run,) = tmp_path.glob("runs/train-tune/*")
    assert read_manifest(run)["outcome"]["state"] == "stopped"


def test_a_second_ctrl_c_waits_for_no_stubborn_program(tmp_path: Path) -> None:
    words = ["torchrun.shutdown_timeout=9999", "nproc_per_node=1", "--", write_program(tmp_path, STUBBORN)]
    with seam.start(tmp_path, "tune", "dataloader", *words) as started:
        wait_for(lambda: any(tmp_path.glob("runs/*/*/workers-0/ready")), "the program", 60)
        started.process.send_signal(signal.SIGINT)
        wait_for(lambda: any(tmp_path.glob("runs/*/*/workers-0/asked")), "the first stage", 60)
        started.process.send_signal(signal.SIGINT)
        assert started.wait(60) == 130
        assert started.survivors() == []


WORDS = ["tune", "batch", "tune.option=--batch-size", "tune.steps=12"]
FAILING = "import sys\nprint('no such data', file=sys.stderr)\nsys.exit(7)\n"
WAITING = "import signal\nsignal.pause()\n"


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.parametrize(
    ("program", "words", "code", "parts"),
    [
        (
            FAILING,
            ["--", "a.py"],
            7,
            ["no such data", "exited with code 7", " (local rank 0) failed", "/rank-0.err"],
        ),
        (WAITING, ["tune.timeout=3", "--", "a.py"], 2, ["not measured within tune.timeout=3 s"]),
    ],
    ids=["a failure", "a program that takes too long"],
)
def test_what_cannot_be_tuned_is_told(
    tmp_path: Path, program: str, words: list[str], code: int, parts: list[str]
) -> None:
    (tmp_path / "a.py").write_text(program)
    done = run_outside(["tune", "dataloader", "nproc_per_node=1", *words], tmp_path)
    assert (done.code, done.out) == (code, "")
    assert all(part in done.err for part in parts) and "Traceback" not in done.err, done.err
    assert not (tmp_path / "conf").exists() and find_working_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("TERM", 143, "`launch` of the trial exited with code 143 "),
        ("KILL", 3, "--batch-size 1 does not fit (`launch` of the trial was killed by SIGKILL"),
    ],
)
def test_a_trial_whose_launch_ends_is_told_of(here: Path, name: str, code: int, said: str) -> None:
    (here / "a.py").write_text(ENDING.format(name))
    done = run_outside(["tune", "batch", "nproc_per_node=1", "--", "a.py", "--batch-size", "1"], here)
    assert done.code == code and f"launch: error: {said}" in done.err, done
    assert find_working_in(here) == []


def test_a_trial_that_the_system_refuses_ends_the_search(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(FULL + ALONE)
    done = run_outside(
        ["tune", "dataloader", "nproc_per_node=1", "tune.steps=12", "--", "a.py", "{}"], tmp_path
    )
    assert done.code == 3 and "0 workers: " in done.err and "waiting for data" in done.err, done
    assert "launch: error: the trial could not be started (" in done.err
    (run,) = tmp_path.glob("runs/a-tune/*")
    assert read_manifest(run)["outcome"].items() >= {"state": "failed", "exit_code": 3}.items()


def test_a_trial_fails_before_it_could_need_memory(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is ended for memory, though it is low: the name is one only without the meter."""
    use_no_memory(monkeypatch)
    (here / "wait.py").write_text(WAITING)
    words = ["nproc_per_node=1", "name=${oc.select:env.LAUNCH_METER,a}", "--", "wait.py", "--batch-size", "1"]
    done = launch(*WORDS, *words)
    assert done.code == 2 and "give a name without /" in done.err, done


@pytest.mark.parametrize(("words", "found"), [([], "a pipe"), (["env.from_file=b.env"], "b file")])
def test_a_trial_has_the_variables_of_the_job(here: Path, words: list[str], found: str) -> None:
    """A pipe is read once. What is set for the ranks alone is not for the `launch` of the trial."""
    (here / "conf").mkdir()
    (here / "conf/launch.yaml").write_text(
        "defaults: [launch_defaults, _self_]\nenv: {from_file: '${oc.env:PIPE}'}\n"
    )
    (here / "b.env").write_text("WHICH=b file")
    (here / "shadow").mkdir()
    (here / "shadow/hydra.py").write_text("raise SystemExit(9)")
    (here / "a.py").write_text("import os, sys\nprint(os.environ['WHICH'], sys.path)\nsys.exit(7)")
    reading, writing = os.pipe()
    os.write(writing, b"WHICH=a pipe\n")
    os.close(writing)
    words = [*words, "nproc_per_node=1", f"env.PYTHONPATH={here}/shadow", "--", "a.py"]
    done = run_outside(
        ["tune", "dataloader", *words], here, {"PIPE": f"/dev/fd/{reading}"}, pass_fds=[reading]
    )
    os.close(reading)
    assert done.code == 7 and f"| {found} [" in done.err and f"{here}/shadow" in done.err, done


@pytest.mark.usefixtures("quick_agent")
@pytest.mark.slow
def test_the_largest_and_the_fastest_are_found_on_two_ranks(tmp_path: Path) -> None:
    """8 MiB a sequence: 16 fit into 230 MiB, and 32 do not; 8 take as long as 16."""
    (tmp_path / "train.py").write_text(BATCHES)
    program = ["--", "train.py", "--batch-size", "16", "--knee", "16", "--limit-mib", "230", "--catch"]
    done = run_outside([*WORDS, "nproc_per_node=2", "format=json", *program], tmp_path, timeout=300)
    assert done.code == 0, done
    result = json.loads(done.out)
    verdicts = {trial["value"]: trial["verdict"] for trial in result["trials"]}
    assert (verdicts[16], verdicts[32]) == ("fits", "does_not_fit")
    assert result["complete"] and result["largest_is_limit"] and result["saved"] is None
    assert result["largest"] in (16, 24) and result["largest_with_margin"] in (12, 16, 24)
    assert result["fastest"] in (12, 16, 24)
    assert result["argument"] == f"--batch-size {result['batch']}"
    by_size = {trial["value"]: trial for trial in result["trials"]}
    assert by_size[16]["memory_kib"] > 2 * 16 * 8 * 1024
    assert 0 < by_size[16]["rate"] < 2 * 16 / 0.05
    assert "can't allocate memory" in by_size[32]["reason"]
    words = f"train.py --batch-size {result['batch']} --knee 16 --limit-mib 230 --catch"
    assert f"use {result['batch']}: `launch nproc_per_node=2 -- {words}`" in done.err
    assert find_working_in(tmp_path) == []
    (run,) = tmp_path.glob("runs/train-tune/*")
    assert json.loads((run / "tuning.json").read_text()) == result


@pytest.mark.usefixtures("quick_agent")
def test_a_failed_allocation_is_no_other_failure(tmp_path: Path) -> None:
    """Without a catch: the rank fails. Nothing fits, not even one sequence."""
    (tmp_path / "train.py").write_text(BATCHES)
    program = ["--", "train.py", "--batch-size=1", "--limit-mib=1"]
    done = run_outside([*WORDS, "nproc_per_node=1", *program], tmp_path)
    assert done.code == 3, done
    assert "error: --batch-size 1 does not fit (" in done.err and "can't allocate memory" in done.err
    assert "Traceback" not in done.err


def test_another_failure_is_shown_with_its_last_lines(tmp_path: Path) -> None:
    """The program has the option that is named, with the first value."""
    (tmp_path / "train.py").write_text(BATCHES)
    words = ["tune.option=--batch-size", "--", "train.py", "--divides", "12"]
    done = run_outside(["tune", "batch", "nproc_per_node=1", *words], tmp_path)
    assert (done.code, done.out) == (1, "")
    assert "AssertionError: 12 % 8" in done.err and "it exited with code 1" in done.err
    assert "does not fit (" not in done.err
    (run,) = tmp_path.glob("runs/train-tune/*")
    assert read_manifest(run)["outcome"]["state"] == "failed"


@pytest.mark.usefixtures("quick_agent")
def test_a_trial_is_ended_before_the_machine_swaps(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_no_memory(monkeypatch)
    (here / "wait.py").write_text(WAITING)
    done = launch(*WORDS, "nproc_per_node=1", "--", "wait.py", "--batch-size", "1")
    assert done.code == 3
    assert "error: --batch-size 1 does not fit (the machine's memory ran out, so it was ended)" in done.err
    assert find_working_in(here) == []


def test_the_bundled_program_is_tuned_by_its_key(here: Path) -> None:
    kept = ["nproc_per_node=1", "model.layers=2"]
    words = [*kept, "tune.steps=12", "tune.max_batch=1", "program.batch_size=1"]
    done = run_outside(["tune", "batch", *words], here, timeout=300)
    assert done.code == 0, done
    assert "sequences/s" in done.out and "largest" in done.out and "(tune.max_batch=1)" in done.err
    assert f"use 1: `launch {' '.join(kept)} program.batch_size=1`" in done.err
