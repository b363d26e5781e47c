"""Where configuration comes from, and what is refused, where a table of command lines does not say it all."""

import json
import os
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from submitit import AutoExecutor
from submitit.slurm.slurm import SlurmExecutor

from launcher import files
from launcher.config.program import fill_env
from launcher.config.settings import Settings
from launcher.config.start import choose_cluster, plan_node
from launcher.plan.model import Request
from tests.data_files import write
from tests.fuzzing import WORDS
from tests.seam import Launch, compose_settings, drop_powers, in_shell, run_outside

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("variables.toml").read_text())
STARTED = "would start a job"
"""What the tests' guard says of a run that gets that far."""


# Folders of configuration


def test_a_relative_conf_with_odd_characters_is_found(
    tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "a b'c\"d é$(x);%20#?&=,[]"
    write(odd / "conf/model/mine.yaml", "name: mine\n")
    monkeypatch.chdir(odd)
    assert launch("--cfg", "job", "-p", "model.name", "model=mine").out == "mine\n"


@pytest.mark.parametrize(
    ("name", "fix"), [("conf", "chmod u+rx"), ("conf/model/tiny.yaml", "Permission denied")]
)
def test_an_unreadable_conf_is_one_line(here: Path, name: str, fix: str) -> None:
    write(here / "conf/model/tiny.yaml", "name: x\n")
    (here / name).chmod(0)
    try:
        run_outside(["dry_run=true"], here, preexec_fn=drop_powers).assert_error(2, str(here / name), fix)
    finally:
        (here / name).chmod(0o755)


def test_what_is_no_file_is_no_option(launch: Launch, here: Path) -> None:
    """Neither a pipe nor a device without an end keeps Hydra, whatever folder they are in."""
    (here / "conf/model").mkdir(parents=True)
    os.mkfifo(here / "conf/launch.yaml")
    (here / "conf/model/x.yaml").symlink_to("/dev/zero")
    write(here / "conf/vocabulary/large.yaml", "#" * (1 << 20) + "\na: &a 1\nb: *a\n")
    assert launch("plan").code == launch("--help-all").code == 0
    launch("plan", "model=x").assert_error(2, "no 'x' in model")
    launch("plan", f"hydra.searchpath=[{here}/conf]", "model=x").assert_error(2, "no 'x' in model")


def test_a_package_in_the_search_path(here: Path) -> None:
    write(here / "theirs/__init__.py", "")
    write(here / "theirs/conf/__init__.py", "")
    write(here / "theirs/conf/experiment/x.yaml", "# @package _global_\nnproc_per_node: 1\n")
    words = ["--cfg", "job", "-p", "nproc_per_node", "hydra.searchpath=[pkg://theirs.conf]", "experiment=x"]
    assert run_outside(words, here, {"PYTHONPATH": str(here)}).out == "1\n"


# Keys and words


def test_a_setting_with_a_set_of_words_takes_no_other(launch: Launch) -> None:
    for key in ("start.warm", "agent", "watch.on_hang", "notify.events"):
        given = f"{key}=[{WORDS[key][0]},foo]" if key == "notify.events" else f"{key}=foo"
        refused = launch(given, "dry_run=true", "--", "true")
        refused.assert_error(2, f"{key}=foo: choose from ", ", ".join(WORDS[key]))


def test_the_shipped_files_set_nothing_but_groups_and_the_program() -> None:
    """So that `launch status` and its like can do without them."""
    composed, plain = compose_settings(), Settings()
    groups = {"allocator", "data", "dataloader", "model", "program"}
    for field in fields(Settings):
        if field.name not in groups:
            assert getattr(composed, field.name) == getattr(plain, field.name), field.name


def test_every_parameter_of_submitits_has_an_answer(launch: Launch) -> None:
    known = yaml.safe_load(launch("--cfg", "job").out)
    names = [f"slurm_{name}" for name in SlurmExecutor._valid_parameters()]
    names += [name for name in AutoExecutor._typed_parameters() if name not in ("name", "nodes")]
    names += [
        f"hydra.launcher.{name}" for name in SlurmExecutor._valid_parameters() - {"use_srun", "teardown"}
    ]
    for some in (names[start : start + 4] for start in range(0, len(names), 4)):
        done = launch(*(f"{name}=1" for name in some), "--", "true")
        done.assert_error(2, *(f"{name}=1 is " for name in some))
        for fix in re.findall(r"the key here is (\w+)", done.err):
            assert fix in known, done


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


# Sweeps, and Hydra's own settings

MULTIRUN = (
    "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      nproc_per_node: 1,2\n"
)


def test_a_sweep_by_hydras_mode(launch: Launch, here: Path) -> None:
    for words in (["hydra.mode=MULTIRUN", "nproc_per_node=1,2"], ["-m", "nproc_per_node=1,2"]):
        assert "launch: job 2 of 2: " in launch(*words, "dry_run=true").err
    write(here / "conf/experiment/x.yaml", MULTIRUN)
    result = launch("experiment=x", "agent=torchrun", "dry_run=true", "program.steps=7,8")
    assert result.out.count("--nproc-per-node=2") == result.out.count("--steps=8") == 2
    assert launch("experiment=x", "dry_run=true", "nproc_per_node=2").err.count("job 1 of 1") == 1
    # Neither for other verbs, nor over a flag.
    assert json.loads(launch("plan", "experiment=x", "format=json", "nproc_per_node=1").out)
    assert "job 1 of" not in launch("--run", "experiment=x", "dry_run=true").err


SHOWN = "import os; print('|'.join(os.environ[name] for name in ('JOB', 'OUT', 'MODEL', 'A')))"


@pytest.mark.usefixtures("quick_agent")
def test_the_runs_of_a_sweep_and_what_hydra_tells_them(here: Path) -> None:
    (here / "a.py").write_text(SHOWN)
    told = ["env.JOB=${hydra:job.num}", "env.OUT=${hydra:runtime.output_dir}/x", "env.A=${name}/y"]
    words = ["-m", "hydra.sweep.dir=swept/${now:%Y}", "name=a,b", "nproc_per_node=1", "~program.steps"]
    words += [*told, "env.MODEL=${hydra:runtime.choices.model}", "--", "a.py"]
    done = run_outside(words, here)
    assert done.code == 0, done.err
    folders = sorted(path.parent for path in here.glob("swept/*/*/manifest.json"))
    assert [folder.name for folder in folders] == ["0", "1"]
    assert [(folder / "logs/0/rank-0.out").read_text().strip() for folder in folders] == [
        f"{number}|{folder}/x|tiny|{name}/y"
        for (number, name), folder in zip(enumerate("ab"), folders, strict=True)
    ]
    run_outside(words, here).assert_error(2, "swept/", "/0, of hydra.sweep.dir, is there already")


PLUGIN = """
from hydra.plugins.search_path_plugin import SearchPathPlugin


class Mine(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        raise ValueError("no folder of our group")
"""


def test_a_plugin_that_adds_no_folder_is_told_of(here: Path) -> None:
    write(here / "plugins/hydra_plugins/mine.py", PLUGIN)
    done = run_outside(["plan", "nproc_per_node=1"], here, {"PYTHONPATH": str(here / "plugins")})
    done.assert_error(2, "no folder of our group")


# Where a job runs, by SLURM's variables


def merge(*names: str) -> dict[str, str]:
    return {name: value for each in names for name, value in TABLES["variables"][each].items()}


@pytest.mark.parametrize(("kind", "nodes", "spares", "names", "found"), TABLES["places"])
def test_where_a_job_runs(
    here: Path, kind: str, nodes: object, spares: int, names: list[str], found: list[object]
) -> None:
    for name in ("srun", "sbatch"):
        write(here / "slurm" / name, "").chmod(0o755)  # looked up, and not run
    config = Settings(nodes=nodes)
    config.cluster.kind, config.cluster.spares = kind, spares
    cluster = choose_cluster(config, {"PATH": "/nowhere", **merge(*names)})
    assert [cluster.kind, cluster.why, cluster.min_nodes, cluster.max_nodes] == found
    is_local = cluster.kind == "local"
    assert (cluster.endpoint, cluster.is_host) == ("localhost:0" if is_local else "", is_local)
    several = choose_cluster(Settings(nodes=1), {**merge("step"), "SLURM_STEP_NUM_TASKS": "2"})
    assert "which has 2: each starts a job of its own" in several.why


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


def test_a_module_in_an_archive(launch: Launch, here: Path) -> None:
    made = in_shell("mkdir m; touch m/__init__.py m/t.py; python3 -m zipfile -c code.zip m; rm -r m", here)
    assert made.code == 0, made
    done = launch("env.PYTHONPATH=code.zip", "dry_run=true", "-m", "m.t")
    assert done.out.endswith("-m m.t\n"), done


# Files of variables

NO_TEXT = (b"A=\xe9\xff", {"A": os.fsdecode(b"\xe9\xff")})


@pytest.mark.parametrize(("data", "found"), [*TABLES["files"], NO_TEXT], ids=repr)
def test_what_stands_in_a_file(here: Path, data: str | bytes, found: dict[str, str]) -> None:
    write(here / "x.env", data)
    assert fill_env(Settings(env={"from_file": "x.env"})).env == found


PROGRAM = """import os
print([os.environ[name] for name in ("A", "B", "C", "HF_TOKEN")], os.environ.get("from_file"))
"""


@pytest.mark.usefixtures("quick_agent")
def test_a_run_has_the_variables_and_its_directory_has_no_secret(tmp_path: Path) -> None:
    """Those given come over the files', these over the environment, and a later file over an earlier one."""
    write(tmp_path / "conf/experiment/x.yaml", "# @package _global_\nenv:\n  from_file: [x y.env, y.env]\n")
    write(tmp_path / "x y.env", "A=one\nB='two  words'\nHF_TOKEN=hf-secret\nC=file\n")
    write(tmp_path / "y.env", "A=file\n")
    write(tmp_path / "show.py", PROGRAM)
    words = ("experiment=x", "env.C=given", "nproc_per_node=1", "new_run_dir=run", "explain=true", "show.py")
    done = run_outside(words, tmp_path, {"A": "user", "NCCL_AUTH_TOKEN": "nccl-secret"})
    assert done.code == 0, done.err
    assert "['file', 'two  words', 'given', 'hf-secret'] None" in done.out
    said = done.err.replace("hf-secret'] None", "")
    assert "HF_TOKEN" in said and "secret" not in said
    texts = {path: path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {path.name for path in texts if "secret" in texts[path]} == {
        "rank-0.out"
    }  # the program's own word
    assert "- x y.env" in texts[tmp_path / "run/config.yaml"]
    (plan,) = (json.loads(text) for path, text in texts.items() if path.name.startswith("plan-"))
    told = {each["name"]: (each["value"], each["from"]) for each in plan["ranks"][0]["variables"]}
    assert told["A"] == ("file", "configuration")
    assert told["HF_TOKEN"] == ("***", "configuration")
    assert told["NCCL_AUTH_TOKEN"] == ("***", "user")


# Pipes


@pytest.mark.parametrize("key", ["machine.snapshot", "env.from_file"])
def test_a_pipe_from_which_nothing_comes(
    launch: Launch, here: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    os.mkfifo(here / "pipe")
    launch("plan", f"{key}=pipe").assert_error(
        2, f"{key}=pipe cannot be read (nothing came from it in 0.1 s)"
    )


def test_a_command_in_place_of_a_file(launch: Launch, here: Path) -> None:
    """As in `env.from_file=<(pass show hf)`, whose output may come late."""
    assert launch("topo", "save=node.json").code == 0
    write(here / "late.sh", "sleep 0.2; echo A=1; sleep 0.2; echo B=two\n")
    line = "launch plan explain=true machine.snapshot=<(cat node.json) env.from_file=<(sh late.sh)"
    done = in_shell(line, here)
    assert done.code == 0 and "two" in done.out, done
