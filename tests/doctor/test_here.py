"""The doctor on this very machine: the shim's trial, the limits of the process, variables, and runs."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor.machine import judge_run_records
from launcher.runs.records import find_last_run, read_run
from tests.doctor.healthy import pick, read_cases, run_doctor
from tests.rank.start_shim import KNOWN, forbid
from tests.seam import Launch, drop_powers, run_outside, run_to_end

RANKS = min(2, len(os.sched_getaffinity(0)))


def run_here(folder: Path, *words: str, **options: Any) -> dict[str, list[dict[str, Any]]]:
    """Run `launch doctor format=json` as a command in a folder: the findings by their rules."""
    done = run_outside(["doctor", f"nproc_per_node={RANKS}", "format=json", *words], folder, **options)
    assert done.err == "", done.err
    findings = json.loads(done.out)["findings"]
    assert done.code == int(bool(pick(findings, "error", "warning")))
    by_rule: dict[str, list[dict[str, Any]]] = {}
    for finding in findings:
        by_rule.setdefault(finding["rule"], []).append(finding)
    return by_rule


def test_what_this_process_has_is_judged_and_nothing_is_left(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    variables = {
        "AMD_SERIALIZE_KERNEL": "0",
        "NCCL_P2P_DISABLE": "1",
        "OMP_PLACES": "cores",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "TORCH_DISTRIBUTED_DEBUG": "detail",
        "TMPDIR": str(scratch),
    }
    found = run_here(
        tmp_path,
        "env.CUDA_LAUNCH_BLOCKING=1",
        env=variables,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, 768)),
    )
    assert found["placement.tried"][0]["level"] == "ok" and list(scratch.iterdir()) == []
    assert found["run.not_compared"][0]["what"].endswith("no run below runs_dir=runs yet")
    (files,) = found["limits.files"]
    assert (files["level"], files["values"]) == ("warning", {"files": 768})
    (serial,) = found["environment.serial"]
    assert (serial["level"], serial["what"]) == ("warning", "CUDA_LAUNCH_BLOCKING=1 is set")
    assert found["environment.caching"][0]["level"] == "warning"
    assert found["environment.detour"][0]["fix"] == "unset NCCL_P2P_DISABLE"
    assert found["environment.debug"][0]["level"] == "note"
    assert "OMP_PLACES=cores is set" in found["placement.plan"][0]["what"]


@pytest.mark.skipif(not KNOWN, reason="the filter knows x86_64 alone")
def test_a_container_that_forbids_memory_policies_is_found(tmp_path: Path) -> None:
    found = run_here(tmp_path, preexec_fn=lambda: forbid("set_mempolicy"))
    (refused,) = found["placement.memory_refused"]
    assert (refused["level"], refused["subject"]) == ("warning", "placement")
    assert "Operation not permitted" in refused["what"] and "SYS_NICE" in refused["fix"]
    assert "environment.clean" in found


@pytest.mark.usefixtures("quick_agent")
def test_a_real_run_is_as_planned_until_it_is_tampered_with(here: Path) -> None:
    run = run_to_end(here, "pass", f"nproc_per_node={RANKS}").run_dir()

    def find(rule: str, *words: str) -> dict[str, Any]:
        (finding,) = (one for one in run_doctor(f"nproc_per_node={RANKS}", *words)[1] if one["rule"] == rule)
        return finding

    passed = find("run.compared")
    assert (passed["level"], passed["values"]["ranks"]) == ("ok", RANKS)
    assert passed["values"]["run"] == f"{run.relative_to(here)}, succeeded"

    record = run / "rank-0.applied.json"
    data = json.loads(record.read_text())
    record.write_text(json.dumps({**data, "cpus": "4000"}))
    for words in ((), ("runs_dir=none", f"run_dir={run}")):
        differs = find("run.differs", *words)
        assert (differs["level"], differs["values"]["rank"]) == ("error", 0)
        assert f"rank 0 runs on CPUs 4000, planned {data['cpus']}" in differs["what"]


RECORDS = read_cases("records.toml")


def plan_rank(local_rank: int) -> dict[str, Any]:
    gpu = {"index": local_rank, "uuid": f"GPU-{local_rank}", "pci": ""}
    cpus = f"{8 * local_rank}-{8 * local_rank + 7}"
    return {**RECORDS["plan"], "local_rank": local_rank, "gpu": gpu, "cpus": cpus}


def write_record(path: Path, local_rank: int, /, **values: Any) -> None:
    """Write the record of a rank that got what was planned, but for some values."""
    planned = plan_rank(local_rank)
    record = {key: planned[key] for key in ("local_rank", "cpus", "memory", "num_workers", "env")}
    record |= {"schema": 1, "host": "a", "rank": local_rank, "attempt": 0, "pid": 10, "agent": 9, "time": 1.0}
    record |= {"gpu": planned["gpu"]["uuid"], "problems": [], **values}
    (path / f"rank-{record['rank']}.applied.json").write_text(json.dumps(record))


def write_run(path: Path, host: str = "a", first: int = 0, **values: Any) -> Path:
    """Write one host's plan of two ranks, and their records, into a run directory."""
    path.mkdir(parents=True, exist_ok=True)
    plan = {"schema": 1, "ranks": [plan_rank(0), plan_rank(1)]}
    (path / f"plan-{host}.json").write_text(json.dumps(plan))
    (path / "manifest.json").write_text(json.dumps({"outcome": {"state": "succeeded"}}))
    for local_rank in (0, 1):
        write_record(path, local_rank, host=host, rank=first + local_rank, **values)
    return path


def judge(path: Path) -> list[str]:
    """What is found on a run directory, as `rule: text`."""
    run = read_run(path)
    return [f"{one.rule}: {one.what}" for one in judge_run_records(run, is_live=run.state == "running")]


def test_a_difference_is_found_with_both_values(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    assert judge(path) == []
    for case in (*RECORDS["difference"], {"has": {"gpu": None}, "says": "has GPU none, planned GPU-1"}):
        write_record(path, 1, **case["has"])
        assert judge(path) == [f"run.differs: a: rank 1 {case['says']}"]


def test_records_that_are_missing_or_too_many(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    write_record(path, 0, problems=["memory policy was refused"])
    write_record(path, 0, host="c", rank=5)
    write_record(path, 0, rank=6, local_rank=6)
    (path / "rank-1.applied.json").unlink()
    assert judge(path) == [
        "run.no_record: a: local rank 1 left no record of its placement",
        "run.problem: a: rank 0: memory policy was refused",
        "run.not_planned: a: rank 6 ran as local rank 6, which is not planned",
        "run.no_plan: ranks 5 ran on c, which has no plan",
    ]
    (path / "manifest.json").write_text(json.dumps({"outcome": {"state": "running"}}))
    assert judge(path)[0] == "run.no_record_yet: a: local rank 1 has no record of its placement yet"


def test_the_newest_records_of_the_last_attempt_count_on_each_host(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", attempt=1, time=5.0)
    write_run(path, host="b", first=2, attempt=0)
    write_record(path, 0, rank=9, cpus="3", attempt=1, time=1.0)
    write_record(path, 1, rank=7, cpus="3", attempt=4, time=2.0)
    assert judge(path) == []
    write_record(path, 0, rank=9, cpus="3", attempt=1, time=9.0)
    assert judge(path) == ["run.differs: a: rank 9 runs on CPUs 3, planned 0-7"]
    write_record(path, 1, attempt=0)
    assert judge(path)[1:] == ["run.no_record: a: local rank 1 left no record of its placement in attempt 1"]


def test_a_node_that_a_spare_one_has_replaced_is_not_missed(tmp_path: Path) -> None:
    """Its ranks are another node's now, which has written their records over its own."""
    path = write_run(tmp_path / "run")
    write_run(path, host="b")
    manifest = {"outcome": {"state": "succeeded"}, "hosts": ["b"], "slurm": {"job_id": "7"}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert judge(path) == []
    (path / "manifest.json").write_text(json.dumps({**manifest, "hosts": ["a", "b"]}))
    missed = [f"run.no_record: a: local rank {rank} left no record of its placement" for rank in (0, 1)]
    assert judge(path) == missed


@pytest.mark.parametrize("name", ["plan-a.json", "rank-0.applied.json", "manifest.json"])
def test_damaged_files_are_told(tmp_path: Path, name: str) -> None:
    path = write_run(tmp_path / "run")
    original = json.loads((path / name).read_text())
    contents = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"ranks": [1]}', b"{}", b"1e999"]
    for content in contents:
        (path / name).write_bytes(content)
        found = judge(path)
        assert [one for one in found if one.startswith(f"run.damaged: {name} cannot be read (")], content
        assert not [one for one in found if one.startswith("run.differs")]
    odd: list[Any] = [None, [], {}, "x", -1, 10**400, {"policy": []}]
    for key in original:
        for value in odd:
            (path / name).write_text(json.dumps({**original, key: value}))
            assert all(isinstance(one, str) for one in judge(path))
    (path / name).unlink()
    os.mkfifo(path / name)
    assert f"run.damaged: {name} cannot be read (no regular file): left out" in judge(path)


def test_which_run_is_compared(here: Path, launch: Launch) -> None:
    (here / "file").touch()
    for name in (".", "file", "nothing"):
        launch("doctor", f"run_dir={name}").assert_error(2, f"run_dir={name} holds no plan-HOST.json")
    write_run(here / "run").chmod(0o300)
    done = run_outside(["doctor", "run_dir=run"], here, preexec_fn=drop_powers)
    done.assert_error(2, "run_dir=run holds no plan-HOST.json that can be read")
    assert find_last_run(here / "runs") is None
    for number, name in enumerate(("train/1", "other/2", "train/3")):
        path = write_run(here / "runs" / name)
        os.utime(path / "plan-a.json", (number, 100 - number))
    (here / "runs" / "train" / "4").mkdir()
    assert find_last_run(here / "runs") == here / "runs" / "train" / "1"
