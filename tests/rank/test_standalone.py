"""The plan that each rank makes for itself, on the lab's machines, without the ranks."""

from dataclasses import replace

import pytest

from launcher.plan.model import Machine, Plan, RankPlan
from launcher.plan.planner import plan
from launcher.rank.entry import Identity
from launcher.rank.standalone import make_entry, plan_rank
from tests.plan.lab_machines import NAMES, ask, convert, load

MACHINES = {name: convert(load(name)) for name in NAMES}
WITH_GPUS = [name for name in NAMES if len(MACHINES[name].gpus) > 1]


def plan_all(machine: Machine, environs: list[dict[str, str]]) -> list[Plan]:
    """Plan as every rank does, each with its own environment."""
    made = []
    for rank, environ in enumerate(environs):
        honoured = {k: v for k, v in environ.items() if k == "CUDA_VISIBLE_DEVICES"}
        request = ask(nproc_per_node=len(environs), environ=honoured)
        made.append(plan_rank(machine, request, rank, environ, alone=False))
    return made


def take_own(plans: list[Plan]) -> list[RankPlan]:
    return [made.ranks[rank] for rank, made in enumerate(plans)]


def see_one(machine: Machine, order: list[int], *, relative: bool) -> list[dict[str, str]]:
    """SLURM's variables of a step with --gpus-per-task=1, as SLURM 22.05 sets them."""
    total = {"SLURM_STEP_ID": "0", "SLURM_GPUS_ON_NODE": str(len(machine.gpus))}
    return [
        {**total, "SLURM_STEP_GPUS": str(gpu), "CUDA_VISIBLE_DEVICES": "0" if relative else str(gpu)}
        for gpu in order
    ]


def near(machine: Machine, rank: RankPlan) -> bool:
    """Whether a rank's CPUs are on its GPU's node, where that has some that the job may use."""
    assert rank.gpu is not None
    home = {cpu.id for cpu in machine.cpus if cpu.node == rank.gpu.node} & machine.allowed_cpus
    return not home or rank.cpus <= home


def are_disjoint(ranks: list[RankPlan]) -> bool:
    return sum(len(rank.cpus) for rank in ranks) == len(frozenset().union(*(rank.cpus for rank in ranks)))


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_comes_to_one_plan(name: str) -> None:
    machine = MACHINES[name]
    count = len(machine.gpus) or 4
    plans = plan_all(machine, [{} for _ in range(count)])
    assert set(map(repr, plans)) == {repr(plan(machine, ask(nproc_per_node=count)))}


@pytest.mark.parametrize("name", WITH_GPUS)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_rank_that_sees_its_own_gpu_alone_takes_that_gpus_place(name: str, reverse: bool) -> None:
    machine = MACHINES[name]
    order = list(range(len(machine.gpus)))[:: -1 if reverse else 1]
    plans = plan_all(machine, see_one(machine, order, relative=False))
    whole = plan(machine, ask(nproc_per_node=len(order)))
    for rank, (mine, gpu) in enumerate(zip(take_own(plans), order, strict=True)):
        assert mine == replace(whole.ranks[gpu], local_rank=rank)
    (warning,) = (text for text in plans[0].warnings if "--gpus-per-node" in text.fix)
    assert f"--gpus-per-node={len(order)}" in warning.fix
    assert not [text for text in plans[0].warnings if "NCCL refuses" in text.what]


@pytest.mark.parametrize("name", WITH_GPUS)
@pytest.mark.parametrize("reverse", [False, True])
def test_where_a_cgroup_hides_the_other_gpus_ranks_stay_near_and_apart(name: str, reverse: bool) -> None:
    machine = MACHINES[name]
    order = list(range(len(machine.gpus)))[:: -1 if reverse else 1]
    environs = see_one(machine, order, relative=True)
    ranks = []
    for rank, (environ, gpu) in enumerate(zip(environs, order, strict=True)):
        seen = replace(machine, gpus=(replace(machine.gpus[gpu], index=0),))
        request = ask(len(order), environ={"CUDA_VISIBLE_DEVICES": "0"})
        made = plan_rank(seen, request, rank, environ, alone=False)
        assert not [text for text in made.warnings if "NCCL refuses" in text.what]
        mine = made.ranks[rank]
        assert mine.gpu == seen.gpus[0]
        assert near(machine, mine)
        ranks.append(mine)
    if len(machine.allowed_cpus) >= 2 * len(order) ** 2:
        assert are_disjoint(ranks)


def test_one_gpu_that_all_ranks_share_is_no_case_of_this() -> None:
    machine = MACHINES["dgx-h100"]
    environ = {
        "SLURM_STEP_ID": "0",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_STEP_GPUS": "5",
        "CUDA_VISIBLE_DEVICES": "5",
    }
    plans = plan_all(machine, [environ] * 4)
    assert not [text for made in plans for text in made.warnings if "--gpus-per-node" in text.fix]
    agents = [{**environ, "SLURM_GPUS_ON_NODE": "8", "TORCHELASTIC_RUN_ID": "x"}] * 4
    assert not [
        text for made in plan_all(machine, agents) for text in made.warnings if "--gpus-per-node" in text.fix
    ]


@pytest.mark.parametrize("binding", ["exclusive", "numa", "socket", "l3", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_keeps_its_cpus_has_memory_and_threads_to_match(name: str, binding: str) -> None:
    machine = MACHINES[name]
    count = len(machine.gpus) or 2
    for rank in plan(machine, ask(nproc_per_node=count)).ranks:
        bound = replace(machine, allowed_cpus=rank.cpus)
        (kept,) = plan_rank(bound, ask(count, binding), rank.local_rank, {}, alone=True).ranks
        cores = {cpu.core for cpu in machine.cpus if cpu.id in rank.cpus}
        assert (kept.local_rank, kept.cpus, kept.gpu) == (rank.local_rank, rank.cpus, rank.gpu)
        assert 1 <= kept.omp_num_threads <= len(cores)
        assert kept.omp_num_threads >= len(cores) - kept.num_workers
        nodes = {cpu.node for cpu in machine.cpus if cpu.id in rank.cpus}
        expected = "preferred" if len(nodes) == 1 and binding != "none" else "default"
        assert kept.memory.policy == expected


def test_a_rank_that_keeps_its_cpus_sees_the_gpus_that_are_spread() -> None:
    machine = MACHINES["dgx-h100"]
    uuids = [machine.gpus[0].uuid, machine.gpus[4].uuid]
    for rank in (0, 1):
        made = plan_rank(machine, ask(2, devices="spread"), rank, {}, alone=True)
        (kept,) = made.ranks
        assert kept.gpu == machine.gpus[4 * rank]
        assert dict(kept.env)["CUDA_VISIBLE_DEVICES"] == ",".join(uuids)


@pytest.mark.parametrize(
    ("words", "environ", "settings"),
    [
        ([], {}, "expandable_segments:True"),
        (["train.py", "--use-nccl-ub"], {}, None),
        (["train.py", "--enable-cuda-graph"], {}, None),
        (["train.py", "--enable-cuda-graph"], {"NCCL_GRAPH_REGISTER": "0"}, "expandable_segments:True"),
        (["--use-nccl-ub"], {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        (["--use-nccl-ub"], {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
    ],
)
def test_expandable_segments_are_left_out_for_a_program_that_refuses_them(
    words: list[str], environ: dict[str, str], settings: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.rank.standalone.probe", lambda root, quick: MACHINES["gh200"])
    made = make_entry(Identity({}), environ, words)
    assert made.env.get("PYTORCH_CUDA_ALLOC_CONF") == settings
    left = settings in (None, "max_split_size_mb:64")
    assert len([text for text in made.advice if "expandable_segments is left out" in text]) == left
