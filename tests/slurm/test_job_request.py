"""What a submission leaves for the job: `job.json` without secrets, the manifest, the judged memory."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher.config.compose import compose, resolve
from launcher.config.settings import NotifyConfig, Settings
from launcher.config.start import plan_node
from launcher.config.words import find_sources
from launcher.errors import MachineError
from launcher.launch.job import Job, JobSpec
from launcher.protocol import LAUNCH_SECRETS
from launcher.runs.manifest import describe_start, read_manifest, write_manifest
from launcher.runs.run_directory import open_run_dir
from launcher.slurm import submission
from launcher.slurm.attempt import start_attempt
from launcher.slurm.job_request import (
    JobRequest,
    make_job_request,
    read_job_request,
    write_job_request,
)
from launcher.slurm.node_job import check_node_fit
from launcher.slurm.node_order import keep_order
from launcher.slurm.sbatch import JobOptions, NodeKind, Option
from launcher.slurm.submission import judge_submission
from tests.seam import run_outside
from tests.specify import specify

WORDS = ("train.py", "--name", "a b\n$(c) 'é\"", "--api-key", "word-secret", "--token=part-secret")
OVERRIDES = [
    "env.HF_TOKEN=env-secret",
    "env.A=1",
    "notify.url=https://example.org/hook-secret",
    "+program.password=own-secret",
    "cluster=slurm",
    "nodes=2:4",
]


def test_a_request_comes_back_as_it_was_and_no_secret_is_written(tmp_path: Path) -> None:
    config = resolve(compose(find_sources(None, None, None), OVERRIDES), Path("/runs/a/1"))
    request = JobRequest(config, {"model": "tiny"}, WORDS, ("launch", "nodes=2:4"), "/home/me", 2, 4)
    left_out = write_job_request(request, tmp_path)
    environ = {LAUNCH_SECRETS: json.dumps({str(tmp_path): left_out})}
    assert read_job_request(tmp_path, environ) == request
    text = (tmp_path / "job.json").read_text()
    assert "secret" not in text and "HF_TOKEN" in text
    assert (tmp_path / "job.json").stat().st_mode & 0o777 == 0o600
    found = read_job_request(tmp_path, {LAUNCH_SECRETS: json.dumps({"/elsewhere": left_out})})
    assert found.config.env == {"HF_TOKEN": "***", "A": "1"}, "those of another run are not taken"
    without = replace(config, env={"A": "1"}, program={"steps": 3}, notify=NotifyConfig())
    plain = replace(request, config=without, words=None)
    assert write_job_request(plain, tmp_path) == {} and read_job_request(tmp_path, {}) == plain


@pytest.mark.parametrize("text", [None, "", "{", "[]", "null", '{"config": {}}'], ids=str)
def test_a_request_that_cannot_be_read_names_the_file(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "job.json").write_text(text)
    with pytest.raises(MachineError, match=r"job\.json cannot be read on .*: is the run directory on a"):
        read_job_request(tmp_path, {})


def test_a_manifest_that_the_job_has_written_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the submission makes of the manifest that it has read does not replace the job's."""
    run, read = open_run_dir(tmp_path, None), threading.Event()
    manifest = describe_start(run, ["launch", "x"], {})
    write_manifest(run, {**manifest, "outcome": {"state": "submitted"}, "slurm": {"job_id": "7"}})
    (run.path / "job.json").write_text("{}")

    def read_slowly(path: Path) -> dict[str, Any]:
        found = read_manifest(path)
        read.set()
        time.sleep(0.5)
        return found

    monkeypatch.setattr(submission, "read_manifest", read_slowly)
    writer = threading.Thread(target=submission.write_job_id, args=(run.path, "7"))
    writer.start()
    assert read.wait(20)
    request = JobRequest(Settings(), {}, ("program",), ("launch", "x"), "/somewhere", 2, 2)
    order = keep_order(("n0", "n1"), "")
    start_attempt(request, run, {"PATH": "/nonexistent", "SLURM_JOB_ID": "7"}, order, requeues=True)
    writer.join()
    submission.write_job_id(run.path, "8")
    found = read_manifest(run.path)
    assert found["outcome"] == {"state": "running"} and found["slurm"]["job_id"] == "7"


SET = ("program.batch_size=8", "program.activation_checkpointing=none")
AUTO = ("program.batch_size=auto", "program.activation_checkpointing=auto")


def choose(*gpus: tuple[str | None, int], asked: int = 8) -> JobOptions:
    """The options of a job on nodes with these GPUs, a kind of node for each."""
    kinds = [NodeKind("main", True, 8, 128, 64, 1_000_000, (gpu,)) for gpu in gpus]
    options = (Option("gpus-per-node", str(asked), "cluster.gpus_per_node"),)
    return JobOptions(options, ("main",), tuple(kinds), ())


def specify_job(*words: str, program: tuple[str, ...] | None = None) -> JobSpec:
    big = ("model=llama13b", "cluster=slurm", "nodes=2", "cluster.kind=slurm", "dry_run=true", *SET)
    spec = specify([*big, *words], program)
    return replace(spec, config=replace(spec.config, dry_run=False))


def test_a_job_that_cannot_fit_is_refused_if_the_nodes_gpus_are_known() -> None:
    spec, small = specify_job(), ("a100_40gb", 8)
    with pytest.raises(
        MachineError, match=r"llama13b does not fit: each GPU \(a100 40gb\) .* program\..*fit\.check=warn"
    ):
        judge_submission(spec, choose(small))
    with pytest.raises(MachineError, match=r"llama13b does not fit: each GPU \(NVIDIA A100-SXM4-40GB\)"):
        judge_submission(specify_job("cluster.machine=dgx_a100"), choose((None, 8)))
    # The largest type that the job may get counts, and another program is never refused.
    two = specify_job("program.batch_size=2")
    assert judge_submission(two, choose(("v100", 8), ("b200", 8))).fit_model is None
    assert judge_submission(specify_job(program=("true",)), choose(small)).fit_model is None
    for unknown in (choose((None, 8)), choose(small, ("new9000", 8)), JobOptions()):
        assert judge_submission(spec, unknown) == spec and spec.fit_model is not None
    # Of several GPUs of a name the largest counts, and ranks have the GPUs that are asked for.
    large = ("program.batch_size=64", "program.grad_accumulation=2")
    for name, told in {"a100": "80.0", "v100": "32.0", "h100": "93.6", "a100_80gb_pcie": "80.0"}.items():
        with pytest.raises(MachineError, match=rf"has {told} GiB") as caught:
            judge_submission(specify_job(*large), choose((name, 8), asked=4))
        assert name == "v100" or "program.grad_accumulation=128" in str(caught.value)


def make_job(spec: JobSpec) -> Job:
    return Job(spec.config, ("true",), spec.cluster, plan_node(spec.config, {}), {}, "n0", spec.agent)


def test_the_first_node_judges_what_the_submission_could_not() -> None:
    spec = judge_submission(specify_job("fit.gpu=A100-40GB"), choose((None, 8)))
    request, job = make_job_request(spec, []), make_job(spec)
    assert request.fit_model == spec.fit_model and request.is_bundled
    with pytest.raises(MachineError, match="llama13b does not fit"):
        check_node_fit(request, job, is_first=True)
    assert check_node_fit(replace(request, fit_model=None), job, is_first=True) == job
    later = judge_submission(specify_job(*AUTO), choose((None, 8)))
    request, job = make_job_request(later, []), make_job(later)
    here = [check_node_fit(request, job, is_first=is_first) for is_first in (True, False)]
    assert here[0] == here[1] and "--grad-accumulation=" in " ".join(here[0].program)


def test_what_is_chosen_at_the_submission_goes_with_the_job() -> None:
    judged = judge_submission(specify_job(*AUTO), choose(("a100_40gb", 8)))
    program = judged.config.program
    assert judged.fit_model is None
    assert (program["activation_checkpointing"], program["parallel"]) == ("full", "fsdp")
    assert program["batch_size"] * program["grad_accumulation"] * 16 == 1024
    assert f"batch_size: {program['batch_size']}" in judged.config_text


def test_the_interpreter_finds_launch_on_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert submission.find_python() == (sys.executable, "-I")
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    monkeypatch.setenv("PYTHONPATH", str(Path(launcher.__file__).parents[1]))
    assert submission.find_python() == (sys.executable, "-P")
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(MachineError, match="the nodes would not find launch"):
        submission.find_python()


SUBMITIT = """
import submitit
for ask in (submitit.JobEnvironment, submitit.helpers.TorchDistributedEnvironment):
    try:
        print("found", ask())
    except RuntimeError as error:
        print("refused", error)
"""


def test_submitits_helpers_in_a_rank_say_that_this_is_no_job_of_theirs(tmp_path: Path) -> None:
    done = run_outside(["nproc_per_node=1", "--", sys.executable, "-c", SUBMITIT], tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("refused Could not figure out which environment") == 2, done.out
