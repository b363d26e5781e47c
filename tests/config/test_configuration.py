"""Where configuration comes from, and what is refused, where a table of command lines does not say it all."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from submitit import AutoExecutor
from submitit.slurm.slurm import SlurmExecutor

from launcher.config.compose import compose, resolve
from launcher.config.mistakes import read_tables
from launcher.config.settings import Settings, list_choices, settle_words
from launcher.config.sources import find_sources
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
    settings = list(list_choices(Settings()))
    assert {"start.warm", "agent", "watch.on_hang", "notify.events"} <= {key for key, _, _ in settings}
    for key, value, words in settings:
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
