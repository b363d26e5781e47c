"""What srun is told: its words, its environment, the nodes' names and ports, from values alone."""

import itertools
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.endpoint import DEFAULT_LOCAL, LOWEST, read_client_ports
from launcher.slurm.notation import expand_hosts, fold_hosts
from launcher.slurm.rendezvous import TRIALS, pick_port
from launcher.slurm.slurm_environ import clean_for_step, drop_task_variables
from launcher.slurm.srun_command import Container, Step, give_cpus, render_step

STEP = Step(2, ("n0", "n1"), False, "/home/me/a b", ("python", "-m", "task", "/runs/x"), {})
BOX = Container("pyxis", "nvcr.io/x:1", ("/runs/x:/runs/x", "/data:/data:ro"), ("--container-writable",))


def test_a_step_has_all_of_its_nodes() -> None:
    assert render_step(STEP) == (
        "srun",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--nodelist=n0,n1",
        "--whole",
        "--overlap",
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--input=all",
        "--chdir=/home/me/a b",
        "--quiet",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "python",
        "-m",
        "task",
        "/runs/x",
    )


@pytest.mark.parametrize(
    ("options", "cpus", "count"),
    [
        ({"cpu_bind": "cores"}, "16(x4)", 16),
        ({"cpu-bind": "verbose,cores"}, "16(x3),8", 8),
        ({"cpu_bind": "cores"}, "8,16(x3)", 8),
        ({"cpu_bind": "cores", "cpus_per_task": 4}, "16(x4)", 4),
        ({"cpu_bind": "cores"}, "", None),
        ({"cpu_bind": "verbose,none"}, "16(x4)", None),
        ({"cpu_bind": None}, "16(x4)", None),
        ({"mem": "20G"}, "16(x4)", None),
        ({}, "16(x4)", None),
    ],
)
def test_a_nodes_task_that_srun_binds_has_all_cpus(
    options: dict[str, object], cpus: str, count: int | None
) -> None:
    given = give_cpus(options, {"SLURM_JOB_CPUS_PER_NODE": cpus})
    words = render_step(replace(STEP, options=given))
    assert [word for word in words if "cpus-per-task" in word] == (
        [] if count is None else [f"--cpus-per-task={count}"]
    )
    assert {*render_step(replace(STEP, options=options))} <= {*words}


def test_an_elastic_step_outlives_a_node() -> None:
    words = render_step(replace(STEP, elastic=True))
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(words)


@pytest.mark.parametrize(
    ("options", "has", "has_not"),
    [
        ({"mem": "20G"}, "--mem=20G", "--mem=0"),
        ({"kill_on_bad_exit": 0}, "--kill-on-bad-exit=0", "--kill-on-bad-exit=1"),
        ({"cpu-bind": "verbose,none"}, "--cpu-bind=verbose,none", "--cpu-bind=none"),
        ({"quiet": False}, "--overlap", "--quiet"),
        ({"nodelist": None}, "--overlap", "--nodelist=n0,n1"),
        ({"network": "job_vni"}, "--network=job_vni", "--no-kill"),
        ({"slurmd_debug": True}, "--slurmd-debug", "--slurmd-debug=True"),
    ],
)
def test_the_users_options_win(options: dict[str, object], has: str, has_not: str) -> None:
    words = render_step(replace(STEP, options=options))
    assert has in words and has_not not in words
    assert words[-4:] == STEP.command


def test_pyxis() -> None:
    words = render_step(replace(STEP, container=BOX))
    assert words[-8:] == (
        "--container-image=nvcr.io/x:1",
        "--container-mounts=/runs/x:/runs/x,/data:/data:ro",
        "--container-workdir=/home/me/a b",
        "--container-writable",
        *STEP.command,
    )


def test_apptainer() -> None:
    words = render_step(replace(STEP, container=replace(BOX, runtime="apptainer", args=("--cleanenv",))))
    assert shlex.join(words).endswith(
        "apptainer exec --nv --bind /runs/x:/runs/x --bind /data:/data:ro --pwd '/home/me/a b' --cleanenv"
        " nvcr.io/x:1 python -m task /runs/x"
    )


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_CPUS_PER_TASK",
        "SRUN_CPUS_PER_TASK",
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_TRES_PER_TASK",
        "SLURM_MEM_PER_CPU",
        "SLURM_GPUS_PER_TASK",
        "SLURM_CPU_BIND",
        "SLURM_EXPORT_ENV",
        "SLURM_HINT",
        "SLURM_NO_KILL",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SBATCH_PARTITION",
        "SALLOC_QOS",
        "PMI_RANK",
        "PMIX_NAMESPACE",
    ],
)
def test_what_srun_or_mpi_would_take_for_an_option_goes(name: str) -> None:
    assert clean_for_step({name: "1", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_CONF",
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_NUM_NODES",
        "SLURM_NNODES",
        "SLURM_CLUSTERS",
        "SLURM_JWT",
        "SLURM_ARRAY_TASK_ID",
        "SLURM_SUBMIT_DIR",
        "SLURM_RESTART_COUNT",
        "SLURMD_NODENAME",
        "MY_SLURM_NTASKS",
        "OMPI_MCA_btl",
    ],
)
def test_what_tells_of_the_job_or_is_the_users_stays(name: str) -> None:
    assert clean_for_step({name: "x"}) == {name: "x"}


def test_what_the_first_node_tells_the_tasks_is_not_for_ranks() -> None:
    told = {
        "LAUNCH_SECRETS": "{}",
        "LAUNCH_RENDEZVOUS": "n0:1",
        "LAUNCH_ATTEMPT": "0",
        "LAUNCH_NIC": "mlx5_0",
    }
    assert drop_task_variables(told) == {"LAUNCH_NIC": "mlx5_0"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n0", ["n0"]),
        ("n[0-3]", ["n0", "n1", "n2", "n3"]),
        ("n[08-10,12]", ["n08", "n09", "n10", "n12"]),
        ("a1,b[2-3],login-x", ["a1", "b2", "b3", "login-x"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("dgx[1-2]-ib", ["dgx1-ib", "dgx2-ib"]),
        ("", []),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert list(expand_hosts(text)) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n0"], "n0"),
        (["n1", "n0", "n3"], "n[0-1,3]"),
        (["n08", "n09", "n10", "n8", "n9"], "n[8-9,08-10]"),
        (["n9", "n10", "n99", "n100"], "n[9-10,99-100]"),
        (["login", "n1", "a-ib", "n2"], "login,n[1-2],a-ib"),
        (["box", "box1", "box2"], "box,box[1-2]"),
        (["7"], "7"),
        ([], ""),
    ],
)
def test_names_are_folded(names: list[str], text: str) -> None:
    assert fold_hosts(names) == text


HOST = st.from_regex(r"[a-z.-]{0,3}([0-9]{1,3}[a-z.-]{0,2}){0,2}[0-9]{0,3}", fullmatch=True).filter(bool)


@given(st.lists(HOST, unique=True, max_size=40))
def test_what_is_folded_is_expanded_to_the_same(names: list[str]) -> None:
    assert sorted(expand_hosts(fold_hosts(names))) == sorted(names)


def test_a_list_that_is_none() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        expand_hosts("n[a-b]")


LOCAL = st.tuples(st.integers(1024, 65535), st.integers(1024, 65535)).map(lambda pair: (min(pair), max(pair)))


@given(st.integers(0, 1 << 26), st.integers(0, 300), st.integers(0, TRIALS), LOCAL)
def test_a_port_is_outside_of_the_kernels_own_where_there_is_room(
    job: int, attempt: int, trial: int, local: tuple[int, int]
) -> None:
    port = pick_port(job, attempt, trial, local)
    assert LOWEST <= port < 65536
    room = max(local[0] - LOWEST, 65535 - max(local[1], LOWEST - 1))
    assert not local[0] <= port <= local[1] or room < 1000


def test_jobs_in_a_row_have_different_ports_and_so_have_the_candidates_of_one() -> None:
    ports = {pick_port(job, 0, 0, DEFAULT_LOCAL) for job in range(123_000, 143_000)}
    assert len(ports) == 20_000
    own = [pick_port(123, *pair, DEFAULT_LOCAL) for pair in itertools.product(range(5), range(TRIALS))]
    assert len(set(own)) == len(own)


def test_the_kernels_own_ports(tmp_path: Path) -> None:
    assert read_client_ports(tmp_path) == DEFAULT_LOCAL
    (tmp_path / "net/ipv4").mkdir(parents=True)
    (tmp_path / "net/ipv4/ip_local_port_range").write_text("15000\t61000\n")
    assert read_client_ports(tmp_path) == (15000, 61000)
