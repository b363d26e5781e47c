"""A submission is refused if what the cluster says of its nodes is enough to know that the job cannot fit."""

from dataclasses import replace

import pytest

from launcher.errors import MachineError
from launcher.launch.job import Job, JobSpec
from launcher.slurm.job_options import JobOptions
from launcher.slurm.job_request import make_job_request
from launcher.slurm.node_job import check_node_fit, plan_here
from launcher.slurm.resources import NodeKind
from launcher.slurm.sbatch_options import Option
from launcher.slurm.submission_fit import describe_site, find_largest_gpu, judge_submission
from tests.specify import specify

SET = ("program.batch_size=8", "program.activation_checkpointing=none")
BIG = ("model=llama13b", "cluster=slurm", "nodes=2", "cluster.kind=slurm", *SET)


def make_kind(*gpus: tuple[str | None, int]) -> NodeKind:
    return NodeKind("main", True, 8, 128, 64, 1_000_000, gpus, "idle", 60.0, ())


def choose(*kinds: NodeKind, gpus: int = 8) -> JobOptions:
    options = (Option("gpus-per-node", str(gpus), "cluster.gpus_per_node"),)
    return JobOptions(options, ("main",), kinds, ())


def specify_job(*words: str, program: tuple[str, ...] | None = None) -> JobSpec:
    spec = specify([*BIG, "dry_run=true", *words], program)
    return replace(spec, config=replace(spec.config, dry_run=False))


def test_gpus_that_are_too_small_refuse_the_job() -> None:
    with pytest.raises(
        MachineError, match=r"llama13b does not fit: each GPU \(a100 40gb\) .* program\..*fit\.check=warn"
    ):
        judge_submission(specify_job(), choose(make_kind(("a100_40gb", 8))))


def test_the_largest_type_that_the_job_may_get_counts(caplog: pytest.LogCaptureFixture) -> None:
    mixed = choose(make_kind(("v100", 8)), make_kind(("b200", 8)))
    judged = judge_submission(specify_job("program.batch_size=2"), mixed)
    assert judged.fit_model is None


@pytest.mark.parametrize("kind", [make_kind((None, 8)), make_kind(("new9000", 8)), make_kind()], ids=str)
def test_unknown_types_leave_it_to_the_first_node(kind: NodeKind) -> None:
    spec = specify_job()
    assert judge_submission(spec, choose(kind)) == spec
    assert spec.fit_model is not None


def test_no_sinfo_leaves_it_to_the_first_node() -> None:
    spec = specify_job()
    assert judge_submission(spec, JobOptions((), (), (), ())) == spec


def test_a_machine_that_is_named_decides() -> None:
    with pytest.raises(MachineError, match=r"llama13b does not fit: each GPU \(NVIDIA A100-SXM4-40GB\)"):
        judge_submission(specify_job("cluster.machine=dgx_a100"), choose(make_kind((None, 8))))


def test_another_program_is_never_refused(caplog: pytest.LogCaptureFixture) -> None:
    judged = judge_submission(specify_job(program=("true",)), choose(make_kind(("a100_40gb", 8))))
    assert judged.fit_model is None


def test_part_of_a_node_has_its_share() -> None:
    site = describe_site(specify_job().config, choose(make_kind(("h100", 8)), gpus=4))
    assert site is not None
    assert (site.ranks, site.node.cores, site.node.memory_kib) == (4, 32, 500_000 << 10)


@pytest.mark.parametrize(
    ("name", "gib"), [("a100", 80), ("v100", 32), ("h100", 94), ("nvidia_a100_80gb_pcie", 80), ("tesla", 0)]
)
def test_the_largest_of_a_name(name: str, gib: int) -> None:
    found = find_largest_gpu(name)
    assert (round(found.memory_mib / 1024) if found else 0) == gib


def test_the_first_node_judges_what_the_submission_could_not() -> None:
    spec = judge_submission(specify_job("fit.gpu=A100-40GB"), choose(make_kind((None, 8))))
    request = make_job_request(spec, [])
    assert request.fit_model == spec.fit_model and request.is_bundled
    plan = plan_here(spec.config, {})
    with pytest.raises(MachineError, match="llama13b does not fit"):
        check_node_fit(
            request, Job(spec.config, ("true",), spec.cluster, plan, {}, "n0", spec.agent), is_first=True
        )
    judged = replace(request, fit_model=None)
    job = Job(spec.config, ("true",), spec.cluster, plan, {}, "n0", spec.agent)
    assert check_node_fit(judged, job, is_first=True) == job


def test_what_is_chosen_at_the_submission_goes_with_the_job() -> None:
    auto = ("program.batch_size=auto", "program.activation_checkpointing=auto")
    judged = judge_submission(specify_job(*auto), choose(make_kind(("a100_40gb", 8))))
    program = judged.config.program
    assert judged.fit_model is None
    assert (program["activation_checkpointing"], program["parallel"]) == ("full", "fsdp")
    assert program["batch_size"] * program["grad_accumulation"] * 16 == 1024
    assert f"batch_size: {program['batch_size']}" in judged.config_text
    later = judge_submission(specify_job(*auto), choose(make_kind((None, 8))))
    request, plan = make_job_request(later, []), plan_here(later.config, {})
    job = Job(later.config, ("true",), later.cluster, plan, {}, "n0", later.agent)
    here = [check_node_fit(request, job, is_first=is_first) for is_first in (True, False)]
    assert here[0] == here[1] and "--grad-accumulation=" in " ".join(here[0].program)
