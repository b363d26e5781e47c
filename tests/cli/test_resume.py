"""`run_dir` goes on with an earlier run, `new_run_dir` makes one; nothing changes a configuration later."""

import copy
from pathlib import Path

import pytest
import yaml

from launcher.cli import run
from launcher.config.request import make_request
from launcher.config.settings import Settings
from launcher.launch.job import JobSpec
from launcher.plan.model import Request
from tests.seam import Launch
from tests.specify import specify


def make_run(here: Path, text: str = "nodes: 1\n") -> Path:
    path = here / "runs/train/20310203-040506"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    (path / "config.yaml").write_text(text)
    return path


def test_the_settings_that_differ_are_listed_without_secrets(here: Path, launch: Launch) -> None:
    path = make_run(here)
    first = specify(["new_run_dir=x", "env.HF_TOKEN=one"], ("true",))
    (path / "config.yaml").write_text(first.config_text)
    words = [f"run_dir={path}", "logs.tail=7", "env.HF_TOKEN=two", "dry_run=true"]
    said = launch(*words, "--", "true").err
    assert "other settings than those of the earlier start" in said
    assert "logs.tail 20 -> 7" in said and "two" not in said and "one" not in said.replace("none", "")
    (path / "config.yaml").write_text("a: &a [*a]\n" * 3)
    assert "other settings" not in launch(*words, "--", "true").err


def test_a_program_of_the_users_own_leaves_nothing_of_the_bundled_one(here: Path) -> None:
    spec = specify([], ("true",))
    written = yaml.safe_load(spec.config_text)
    assert not {"model", "data", "program"} & (written.keys() | spec.choices.keys())
    assert (spec.config.model, spec.config.data, spec.config.program) == ({}, {}, {})
    bundled = specify([])
    assert bundled.choices["model"] == "tiny" and yaml.safe_load(bundled.config_text)["model"]


def test_nothing_changes_a_resolved_configuration(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a whole start, which `true` takes to its end."""
    from launcher.cli.main import run_guarded

    specs: list[tuple[JobSpec, JobSpec]] = []
    make = run.specify_job

    def keep(*args: object, **options: object) -> JobSpec:
        spec = make(*args, **options)  # type: ignore[arg-type]  # as it was called
        specs.append((spec, copy.deepcopy(spec)))
        return spec

    monkeypatch.setattr(run, "specify_job", keep)
    assert run_guarded(["nproc_per_node=1", "--", "true"]) == 0
    ((spec, before),) = specs
    assert spec == before


def test_the_defaults_of_a_request_are_the_schemas() -> None:
    """`launch-rank` by itself has no configuration, and plans with the former."""
    assert make_request(Settings(allocator={"expandable_segments": True}), {}) == Request()
