"""Where configuration comes from, and what is refused, where a table of command lines does not say it all."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib.machinery import ModuleSpec
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from submitit import AutoExecutor
from submitit.slurm.slurm import SlurmExecutor

from launcher.config.compose import compose, resolve
from launcher.config.program import resolve_program
from launcher.config.settings import Settings, list_settings, settle_words
from launcher.config.start import choose_cluster, plan_node
from launcher.config.words import find_sources, read_tables
from launcher.errors import UsageError
from launcher.plan.model import Request
from tests.seam import Launch, drop_powers, run_outside

STARTED = "would start a job"
"""What the tests' guard says of a run that gets that far."""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_relative_conf_with_odd_characters_is_found(
    tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "a b'c\"d é$(x);%20#?&=,[]"
    write(odd / "conf/model/mine.yaml", "name: mine\n")
    monkeypatch.chdir(odd)
    assert launch("--cfg", "job", "-p", "model.name", "model=mine").out == "mine\n"


@pytest.mark.parametrize("name", ["conf", "conf/model", "conf/model/tiny.yaml"])
def test_an_unreadable_conf_is_one_line(here: Path, name: str) -> None:
    write(here / "conf/model/tiny.yaml", "name: x\n")
    (here / name).chmod(0)
    try:
        result = run_outside(["dry_run=true"], here, preexec_fn=drop_powers)
        result.assert_error(2, f"{here / name} cannot be read", "chmod -R u+rX")
        assert run_outside(["--help-all"], here, preexec_fn=drop_powers).code == 0
    finally:
        (here / name).chmod(0o755)


def test_a_package_in_the_search_path(here: Path) -> None:
    write(here / "theirs/__init__.py", "")
    write(here / "theirs/conf/__init__.py", "")
    write(here / "theirs/conf/experiment/x.yaml", "# @package _global_\nnproc_per_node: 1\n")
    words = ["hydra.searchpath=[pkg://theirs.conf]", "experiment=x", "dry_run=true", "--", "true"]
    result = run_outside(words, here, {"PYTHONPATH": str(here)})
    assert result.code == 0 and "configuration from theirs/conf/experiment/x.yaml" in result.err, result


def test_a_setting_with_a_set_of_words_takes_no_other(launch: Launch) -> None:
    settings = {key: (value, each.metadata) for key, value, each in list_settings(Settings())}
    for key in ("start.warm", "agent", "watch.on_hang", "notify.events"):
        value, words = settings[key][0], settings[key][1]["choices"]
        given = f"{key}=[{words[0]},foo]" if isinstance(value, list) else f"{key}=foo"
        refused = f"{key}=foo: choose from {', '.join(words)}"
        launch(given, "dry_run=true", "--", "true").assert_error(2, refused)


def test_the_shipped_files_set_nothing_but_groups_and_the_program() -> None:
    """So that `launch status` and its like can do without them."""
    composed, plain = resolve(compose(find_sources(None, None, None), [])), Settings()
    settle_words(plain)
    groups = {"allocator", "data", "dataloader", "model", "program"}
    for field in fields(Settings):
        if field.name not in groups:
            assert getattr(composed, field.name) == getattr(plain, field.name), field.name


def test_every_parameter_of_submitits_has_an_answer(launch: Launch) -> None:
    names = [f"slurm_{name}" for name in SlurmExecutor._valid_parameters()]
    names += [name for name in AutoExecutor._typed_parameters() if name not in ("name", "nodes")]
    names += [
        f"hydra.launcher.{name}" for name in SlurmExecutor._valid_parameters() - {"use_srun", "teardown"}
    ]
    for some in (names[start : start + 4] for start in range(0, len(names), 4)):
        done = launch(*(f"{name}=1" for name in some), "--", "true")
        done.assert_error(2, *(f"{name}=1 is " for name in some))


def test_a_secret_of_another_tools_word_is_not_shown(launch: Launch) -> None:
    told = launch("HF_TOKEN=hf_secretsecretsecret", "--api-key", "secretsecret", "train.py")
    assert told.code == 2 and "secretsecret" not in told.err and "env.HF_TOKEN" in told.err


def test_the_keys_that_are_told_of_exist(launch: Launch) -> None:
    known = yaml.safe_load(launch("--cfg", "job").out).keys()
    for tool, names in read_tables().items():
        for name, fix in names.items():
            top = fix.partition(",")[0].partition(" ")[0].partition(".")[0]
            assert top in known or fix.startswith("leave it out") or tool == "short", name


def test_a_gpu_whose_memory_is_not_known_has_no_estimate(launch: Launch, here: Path) -> None:
    """The table of GPUs knows the memory of some whose description does not."""
    machine = json.loads(launch("topo", "machine=dgx_h100", "format=json").out)
    for gpu in machine["gpus"]:
        gpu.update(name="A new one", memory_mib=0)
    write(here / "new.json", json.dumps(machine))
    for program in ((), ("--", "true")):
        plan = launch("plan", "machine.snapshot=new.json", "+model=gpt2", "format=json", *program)
        assert plan.code == 0 and "fit" not in json.loads(plan.out)
    dry = launch("machine.snapshot=new.json", "+model=gpt2", "agent=torchrun", "dry_run=true").out.split()
    sizes = dict(word.split("=") for word in dry if word.startswith(("--batch-size", "--grad-accumulation")))
    assert int(sizes["--batch-size"]) * int(sizes["--grad-accumulation"]) * 8 == 512


def test_a_job_on_cpus_is_warned_of_since_swap_may_hold_it(launch: Launch) -> None:
    words = ("+model=llama70b", "nproc_per_node=1", "program.batch_size=1")
    launch(*words, "fit.gpu=T4").assert_error(3, "does not fit")
    done = launch(*words, "program.device=cpu", "start.warm=off")
    assert "does not fit" in done.err and STARTED in done.err, done


# Where a job runs, by SLURM's variables

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
JOB = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3"}
BATCH_STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967291"}
"""The batch script's own step, as slurm.h numbers it."""


@pytest.mark.parametrize(
    ("kind", "nodes", "environ", "found"),
    [
        ("auto", 1, {}, ("local", "nodes=1", 1, 1)),
        ("local", "1:1", {}, ("local", "cluster=local", 1, 1)),
        ("auto", "1:4", {}, ("local", "nodes=1:4", 1, 1)),
        ("auto", "auto", {}, ("local", "one node", 1, 1)),
        ("auto", 1, JOB, ("local", "nodes=1, on this node of SLURM job 7, and no srun on PATH", 1, 1)),
        ("auto", "auto", STEP, ("local", "one node, a task of SLURM step 7.0", 1, 1)),
        ("auto", 4, {"PATH": "slurm"}, ("slurm", "nodes=4", 4, 4)),
        ("auto", "2:4", {"PATH": "slurm"}, ("slurm", "nodes=2:4", 2, 4)),
        ("slurm", "auto", {"PATH": "slurm"}, ("slurm", "cluster=slurm", 1, 1)),
        ("auto", 1, {"PATH": "slurm"}, ("local", "nodes=1", 1, 1)),
        ("auto", "auto", {"PATH": "slurm", **JOB}, ("allocation", "SLURM job 7", 3, 3)),
        ("auto", 2, {"PATH": "slurm", **JOB}, ("allocation", "SLURM job 7", 2, 2)),
        ("auto", "2:9", {"PATH": "slurm", **JOB}, ("allocation", "SLURM job 7", 2, 3)),
        ("auto", 1, {"PATH": "slurm", **BATCH_STEP}, ("allocation", "SLURM job 7", 1, 1)),
        ("slurm", 2, {"PATH": "slurm", **JOB}, ("slurm", "cluster=slurm", 2, 2)),
        ("allocation", "auto", {"PATH": "slurm", **BATCH_STEP}, ("allocation", "cluster=allocation", 1, 1)),
    ],
)
def test_where_a_job_runs(
    here: Path, kind: str, nodes: object, environ: Mapping[str, str], found: tuple[str, str, int, int]
) -> None:
    for name in ("srun", "sbatch"):
        write(here / "slurm" / name, "").chmod(0o755)  # looked up, and not run
    cluster = choose_cluster(kind, nodes, None, None, {"PATH": "/nowhere", **environ})
    assert (cluster.kind, cluster.why, cluster.min_nodes, cluster.max_nodes) == found
    is_local = cluster.kind == "local"
    assert (cluster.endpoint, cluster.is_host) == ("localhost:0" if is_local else "", is_local)


def test_several_tasks_of_a_step_are_told() -> None:
    environ = {**STEP, "SLURM_STEP_NUM_TASKS": "2"}
    assert "which has 2: each starts a job of its own" in choose_cluster("auto", 1, None, None, environ).why


def test_spare_nodes_of_an_allocation(here: Path) -> None:
    write(here / "slurm/srun", "").chmod(0o755)
    environ = {**JOB, "PATH": "slurm"}
    assert choose_cluster("auto", "auto", None, None, environ, spares=1).max_nodes == 2
    assert choose_cluster("auto", 1, None, None, environ, spares=2).max_nodes == 1


def test_each_setting_reaches_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Settings(nproc_per_node=3, devices="own", env={"OMP_NUM_THREADS": "5", "API_TOKEN": "sesame"})
    config.allocator = {"max_split_size_mb": 64, "host": "jemalloc"}
    config.machine.snapshot = str(Path(__file__).parents[2] / "conf/machine/dgx_h100.json")
    environ = {**config.env, "NCCL_DEBUG": "INFO", "NCCL_SECRET_KEY": "open", "CUDA_HOME": "/cuda"}
    environ |= {"CUDA_VISIBLE_DEVICES": "1", "HOME": "/home/me"}
    asked: list[Request] = []
    monkeypatch.setattr("launcher.plan.planner.plan", lambda _, request: asked.append(request))
    plan_node(config, environ, "/tmp/caches")
    (found,) = asked
    assert (found.nproc_per_node, found.devices, found.caches) == (3, "own", "/tmp/caches")
    for section in ("binding", "dataloader", "gc", "allocator"):
        assert getattr(found, section) is getattr(config, section)
    assert found.environ.items() >= {"OMP_NUM_THREADS": "5", "NCCL_DEBUG": "INFO"}.items()
    assert not found.environ.keys() & {"CUDA_HOME", "HOME", "CUDA_VISIBLE_DEVICES"}
    assert found.configured["OMP_NUM_THREADS"] == "5" and "sesame" not in found.configured["API_TOKEN"]
    assert found.environ["NCCL_SECRET_KEY"] != "open"


# From the words of the user to what a rank execs


def test_modules_in_an_archive_and_of_an_editable_install(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `python -m` finds beside folders: a zip, and a finder that knows a module by its whole name."""
    with ZipFile(here / "code.zip", "w") as archive:
        archive.writestr("zipped/__init__.py", "")
        archive.writestr("zipped/train.py", "")
    environ = {"PATH": "/nowhere", "PYTHONPATH": "code.zip"}
    assert resolve_program(["-m", "zipped.train"], environ)[1:] == ("-m", "zipped.train")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return ModuleSpec(name, None, origin="train.py") if name == "shared.train" else None

    (here / "shared").mkdir()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert resolve_program(["-m", "shared.train"], os.environ)[1:] == ("-m", "shared.train")
    with pytest.raises(UsageError, match=r"no module 'shared\.trian'"):
        resolve_program(["-m", "shared.trian"], os.environ)


@given(st.lists(st.text(), max_size=5))
def test_arguments_stay_as_they_are(arguments: list[str]) -> None:
    assert resolve_program([sys.executable, *arguments], os.environ) == (sys.executable, *arguments)
    assert resolve_program(["-m", "json.tool", *arguments], os.environ) == (
        *(sys.executable, "-m", "json.tool"),
        *arguments,
    )
