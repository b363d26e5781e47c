"""Shipped machines: as they are described, planned as well as each allows, and chosen by `machine=NAME`."""

import json
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from launcher.plan.model import Request, parse_machine, plan_to_json
from launcher.plan.planner import plan as make_plan
from tests.plan.lab_machines import fsroot, load, score
from tests.probe.machine_trees import short_lived
from tests.seam import Launch

from .build import NAMES, SHIPPED, build_files, read_description


def plan(launch: Launch, *words: str) -> dict[str, Any]:
    """What `launch plan` prints."""
    result = launch("plan", "format=json", *words)
    assert result.code == 0, result.err
    made: dict[str, Any] = json.loads(result.out)
    return made


def list_pci(made: dict[str, Any]) -> list[str]:
    """The ranks' GPUs."""
    return [rank["gpu"]["pci"] for rank in made["ranks"]]


def test_a_shipped_machine_is_planned_anywhere_and_as_well_as_it_allows(launch: Launch) -> None:
    for name in NAMES:
        text = (SHIPPED / f"{name}.json").read_text()
        made = plan_to_json(make_plan(parse_machine(text), Request()))
        assert made["machine"] == json.loads(text)
        assert len(made["ranks"]) == (len(made["machine"]["gpus"]) or 2)
        result = score.score({"name": name, **read_description(name)}, made)
        assert {measure for measure, pair in result.items() if not score.holds({measure: pair})} == set(), (
            name
        )
    told = plan(launch, "machine=dgx_h100")
    assert told["machine"] == json.loads((SHIPPED / "dgx_h100.json").read_text()) and len(told["ranks"]) == 8


def keep_own(folder: Path, name: str) -> None:
    """Put a machine of one's own into a configuration folder: a GH200 by another name."""
    (folder / "machine").mkdir(parents=True)
    data = json.loads((SHIPPED / "gh200.json").read_text()) | {"name": name}
    (folder / "machine" / "ours.json").write_text(json.dumps(data))
    (folder / "machine" / "ours.yaml").write_text("snapshot: ours.json\n")


def test_a_team_ships_a_machine_of_its_own(here: Path, launch: Launch) -> None:
    """conf/ comes before --config-dir, and the working directory before both."""
    keep_own(here / "team", "the team's")
    assert plan(launch, "-cd", "team", "machine=ours")["machine"]["name"] == "the team's"
    keep_own(here / "conf", "conf's")
    assert plan(launch, "-cd", "team", "machine=ours")["machine"]["name"] == "conf's"
    assert "configuration from conf/machine/ours.yaml" in launch("plan", "machine=ours").err
    assert "ours" in launch("--help-all").out
    (here / "ours.json").write_text((SHIPPED / "gh200.json").read_text())
    assert plan(launch, "-cd", "team", "machine=ours")["machine"]["name"].startswith("NVIDIA GH200")
    (here / "ours.json").unlink()
    (here / "conf/machine/ours.json").write_text("{")
    result = launch("plan", "machine=ours")
    assert (result.code, result.out) == (2, "")
    assert "conf/machine/ours.json: not a machine snapshot" in result.err.splitlines()[-1]


def test_a_snapshot_can_be_named_by_its_file_too(here: Path, launch: Launch) -> None:
    by_name = plan(launch, "machine=dgx_h100")
    assert plan(launch, "machine.snapshot=dgx_h100.json") == by_name
    assert plan(launch, f"machine.snapshot={SHIPPED}/dgx_h100.json") == by_name
    (here / "marked.json").write_text((SHIPPED / "dgx_h100.json").read_text(), encoding="utf-8-sig")
    assert plan(launch, "machine.snapshot=marked.json") == by_name


@pytest.mark.parametrize("name", ["aws_p5_48xlarge", "cpu_2s"])
def test_where_a_machine_is_known_from_is_told_whole(launch: Launch, name: str) -> None:
    data = json.loads((SHIPPED / f"{name}.json").read_text())
    shown = " ".join(launch("topo", f"machine={name}").out.split())
    assert shown.startswith(f"Machine {data['name']} ")
    assert f"source {' '.join(data['source'].split())}" in shown


def test_a_device_list_of_this_machine_is_not_the_clusters_and_is_told_of(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = plan(launch, "machine=dgx_h100")
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0")
    for name in ("LAUNCH_NIC", "NCCL_IB_HCA"):
        monkeypatch.setenv(name, "mlx5_77")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,2,5")
    assert plan(launch, "machine=dgx_h100") == alone
    meant = "env.CUDA_VISIBLE_DEVICES=6,2,5"
    chosen = plan(launch, "machine=dgx_h100", meant)
    assert list_pci(chosen) == [list_pci(alone)[gpu] for gpu in (6, 2, 5)]
    warning = (
        "launch: warning: CUDA_VISIBLE_DEVICES=6,2,5 is of this machine, and does not count in a plan for "
        f"dgx_h100: set {meant} if it is meant for that"
    )
    for words in (("plan", "machine=dgx_h100"), ("dry_run=true", "machine=dgx_h100", "--", "true")):
        assert launch(*words).err.splitlines().count(warning) == 1
        assert "CUDA_VISIBLE_DEVICES" not in launch(*words[:2], meant, *words[2:]).err
    assert "CUDA_VISIBLE_DEVICES" not in launch("topo", "machine=dgx_h100").err


def test_a_written_out_machine_is_planned_with_the_device_list(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with short_lived() as root:
        fsroot.materialize(load("dgx-h100"), root)
        assert list_pci(plan(launch, f"machine.root={root}")) == ["0000:52:00.0"]


WANTED = (
    *("dgx_a100", "dgx_h100", "dgx_b200", "gh200", "gb200_nvl4", "oci_mi300x_8"),
    *("aws_p3_16xlarge", "aws_p4d_24xlarge", "aws_p5_48xlarge", "gcp_a3_highgpu_8g"),
    *("azure_ndv4", "azure_ndv5", "azure_ncv4", "cpu_2s"),
)


def test_what_is_shipped_is_what_is_described() -> None:
    shipped = {path.name for path in SHIPPED.iterdir()} - {"local.yaml"}
    assert shipped == {f"{name}.{kind}" for name in NAMES for kind in ("json", "yaml")}
    assert set(WANTED) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_file_is_what_its_description_gives_and_says_where_from(name: str) -> None:
    for file, text in build_files(name).items():
        assert (SHIPPED / file).read_text() == text, "make them again: python -m tests.machines.build"
    text = (SHIPPED / f"{name}.json").read_text()
    machine = json.loads(text)
    assert machine["name"] and len(machine["source"]) > 60
    assert {gpu["uuid"] for gpu in machine["gpus"]} <= {""}
    text += (SHIPPED / f"{name}.yaml").read_text()
    assert gettempdir() not in text and "fffe:" not in text
