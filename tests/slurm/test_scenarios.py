"""Jobs that end in every way, without SLURM: a scenario says what nodes and SLURM do, and what comes of it.

The real program of the first node runs in a run directory that a real submission has made; SLURM's commands
are fake_slurm.sh. `scenarios/README.md` describes the files.
"""

import copy
import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.seam import clean_environ, run_outside

HERE = Path(__file__).parent
COMMANDS = ("srun", "squeue", "sinfo", "sacct", "scontrol", "scancel", "sbatch")
ANSWERS = {
    "job": ["RUNNING|0|N/A|N/A|1:00|None|"],
    "excluded": ["(null)|(null)|main"],
    "requeue": [""],
    "accounting": [""],
    "starts": [""],
    "states": ["n0|idle", "n1|idle"],
    "partition": ["n0", "n1", "n2", "n3"],
    "topology": [""],
    "preflight": ["exit 1"],
    "guards": ["cat >/dev/null"],
}
"""What SLURM says if a start does not tell; see fake_slurm.sh."""
CHANGES = ("scontrol requeue", "scontrol update", "scancel", "sbatch")
"""Calls that change something."""


def merge(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Put one tree over another."""
    both = copy.deepcopy(dict(base))
    for key, value in other.items():
        nested = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merge(both[key], value) if nested else value
    return both


def list_scenarios() -> Iterator[Any]:
    """Give each scenario, and each of its cases, which are put over its last start."""
    for path in sorted((HERE / "scenarios").glob("*.toml")):
        for scenario in tomllib.loads(path.read_text())["scenario"]:
            cases = scenario.pop("case", [{}])
            *before, last = scenario.pop("start")
            for number, case in enumerate(cases):
                job = merge(scenario, case.get("job", {}))
                starts = [*before, merge(last, {key: case[key] for key in case if key != "job"})]
                name = scenario["name"] + (f" ({number})" if len(cases) > 1 else "")
                yield pytest.param(job, starts, id=name)


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory as a submission leaves it."""
    folder = tmp_path_factory.mktemp("submitted")
    environ = prepare(folder)
    words = ("cluster=slurm", "nodes=2", "nproc_per_node=2", "cluster.gpus_per_node=0", "name=job")
    done = run_outside([*words, "--", "true"], folder, environ)
    assert done.code == 0, done
    (run,) = folder.glob("runs/job/*")
    return run


@pytest.fixture(scope="module")
def first_nodes() -> Iterator["subprocess.Popen[str]"]:
    """The process that runs the first node's program."""
    command = [sys.executable, "-m", "tests.slurm.first_nodes"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin
        process.stdin.close()


def prepare(folder: Path) -> dict[str, str]:
    """Put SLURM's commands into a folder, and return the environment in which they are found."""
    (folder / "bin").mkdir()
    (folder / "facts").mkdir()
    for name in COMMANDS:
        (folder / "bin" / name).symlink_to(HERE / "fake_slurm.sh")
    for name, lines in ANSWERS.items():
        write_answers(folder, name, lines)
    return {**clean_environ(), "PATH": f"{folder}/bin:/usr/bin:/bin"}


def write_answers(folder: Path, name: str, lines: list[str]) -> None:
    if name == "job":  # a row of squeue's of which a scenario tells state, restarts, times and reason
        lines = [line if line.startswith("!") else fill_row(*line.split("|")) for line in lines]
    (folder / "facts" / name).write_text("".join(f"{line}\n" for line in lines))
    (folder / "facts" / f"{name}.asked").unlink(missing_ok=True)


def fill_row(state: str, restarts: str, *rest: str) -> str:
    """Return a whole row of squeue's on the job."""
    return "|".join(["7", state, "main|2|n[0-1]|N/A", restarts, "0", *rest])


def make_record(host: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """The record that a node leaves: {"fails": CODE} is a rank's failure, -N for signal N."""
    told = {key: value for key, value in told.items() if value != "null"}
    code, number = told.get("fails"), int(host[1:])
    failure = code is not None and {
        **{
            "rank": told.get("rank", 2 * number),
            "local_rank": told.get("local_rank", 0),
            "time": told.get("at", 2.0),
        },
        **{"exitcode": code, "reason": f"exited with code {code}", "log": f"rank-{number}.err"},
        "lines": told.get("lines", []),
    }
    status = 128 - code if code and code < 0 else code or 0
    record = {
        **{"host": host, "node_rank": number, "state": "failed" if failure else "succeeded"},
        **{"exit_code": status, "signal": None, "agent_said": "", "failure": failure or None, "restarts": 0},
        **{"started": 0.0, "ended": 9.0, "ranks": 2, "clean": []},
    }
    return {**record, **{key: told[key] for key in told if key in (*record, "hang")}}


def write_step(folder: Path, start: Mapping[str, Any]) -> None:
    """Write what srun does when the ranks' step is started."""
    lines = ['logs="$folder/run/logs/$LAUNCH_ATTEMPT"']
    shutil.rmtree(folder / "facts/records", ignore_errors=True)
    (folder / "facts/records").mkdir()
    well = True
    for host, told in {"n0": {}, "n1": {}, **start.get("nodes", {})}.items():
        if told != "missing":
            state = {"state": "stopped", "exit_code": 143} if told == "stopped" else told
            path, record = folder / f"facts/records/node-{host}.json", make_record(host, state)
            path.write_text(json.dumps(record))
            lines.append(f'cp "{path}" "$logs"')
        well = well and told != "missing" and record["state"] == "succeeded" and not record["exit_code"]
    steps = start.get("steps", [])
    text = "".join(f"step {step}/10 loss {10 - step}.0\n" for step in steps)
    lines += [f'printf %s {shlex.quote(text)} >"$logs/rank-0.out"'] if steps else []
    lines += [start["sh"]] if "sh" in start else []
    lines += [f"echo {shlex.quote(line)} >&2" for line in start.get("early", [])]
    for name in start.get("signals", []):
        lines += [f"kill -{name} $PPID", *await_answer(name, start.get("slurm", {}).get("job", "RUNNING"))]
    lines += [f"echo {shlex.quote(line)} >&2" for line in start.get("srun", [])]
    code = start.get("code", 0 if well else 1)
    lines.append(f"kill -{-code} $$" if code < 0 else f"exit {code}")
    (folder / "facts/step.sh").write_text("\n".join(lines) + "\n")


def await_answer(name: str, job: str | list[str]) -> list[str]:
    """What srun does after a signal to the first node, whose process orders the same for the ranks.

    But if SLURM ends the job, it has told the ranks by itself, and the manifest says why.
    """
    if name == "KILL":
        return ["exit"]
    if (job if isinstance(job, str) else job[0]).startswith(("RUNNING", "!")):
        return [f"await_order SIG{name}"]
    return ["""while grep -q '"running"' "$folder/run/manifest.json"; do sleep 0.01; done"""]


def assert_part(found: object, expected: object, where: str) -> None:
    """Assert that a tree has all that another one has."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), (where, found)
        for key, value in expected.items():
            assert_part(found.get(key), None if value == "null" else value, f"{where}.{key}")
    else:
        assert found == expected, (where, found, expected)


@pytest.mark.parametrize(("job", "starts"), [*list_scenarios()])
def test_what_becomes_of_a_job(
    job: dict[str, Any],
    starts: list[dict[str, Any]],
    submitted: Path,
    first_nodes: "subprocess.Popen[str]",
    tmp_path: Path,
) -> None:
    environ, run = {"SLURM_JOB_NODELIST": "n[0-1]", **prepare(tmp_path)}, tmp_path / "run"
    shutil.copytree(submitted, run)
    request = json.loads((run / "job.json").read_text())
    settings = {"cluster": {"node_order": "slurm", "requeue": job.get("requeue", {})}}
    request["config"] = merge(merge(request["config"], settings), job.get("config", {}))
    request["directory"] = str(tmp_path)
    for name in job.get("missing", ()):
        (tmp_path / "bin" / name).unlink()
    if "nodes" in job:
        request["min_nodes"], request["max_nodes"] = job["nodes"]
        request["agent"] = "torchrun"
        environ["SLURM_JOB_NODELIST"] = f"n[0-{request['max_nodes'] - 1}]"
    (run / "job.json").write_text(json.dumps(request))
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(merge(manifest, job.get("manifest", {}))))
    for number, start in enumerate(starts):
        play(first_nodes, tmp_path, number, merge({"environ": job.get("environ", {})}, start), environ)


def test_inside_an_allocation_nothing_is_requeued_and_the_run_can_be_submitted_again(tmp_path: Path) -> None:
    environ = prepare(tmp_path)
    write_step(tmp_path, {"nodes": {"n1": {"fails": 7}}})
    (tmp_path / "facts/topology").write_text("echo 'SwitchName=s Level=0 LinkSpeed=1 Nodes=n[0-1]'\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n0", "SLURM_JOB_NUM_NODES": "2"}
    words = ("nproc_per_node=1", "cluster.requeue.crash=9", "cluster.node_order=topology")
    done = run_outside([*words, "new_run_dir=run", "--", "true"], tmp_path, {**environ, **job})
    assert done.code == 7, done
    assert "requeue" not in done.err and "attempt 1 ended: the program failed\n" in done.err
    assert not any(call.startswith(CHANGES) for call in (tmp_path / "calls").read_text().splitlines())
    path = tmp_path / "run/manifest.json"
    before = json.loads(path.read_text())
    assert before["outcome"]["state"] == "failed" and before["earlier"] == []
    again = run_outside(["run_dir=run", "cluster=slurm", "nodes=2", "nproc_per_node=1"], tmp_path, environ)
    assert again.code == 0, again
    manifest = json.loads(path.read_text())
    (entry,) = manifest["earlier"]
    assert manifest["outcome"]["state"] == "submitted"
    assert (entry["slurm"]["job_id"], entry["attempt"]) == ("7", 0)
    assert entry["node_order"]["hosts"] == entry["hosts"] == ["n0", "n1"]


def test_the_script_of_a_dry_run_requeues_its_job_in_the_same_directory(tmp_path: Path) -> None:
    environ = prepare(tmp_path)
    write_step(tmp_path, {"nodes": {"n1": {"fails": 7}}})
    step = (tmp_path / "facts/step.sh").read_text()
    settings = (
        "dry_run=true nodes=2 cluster=slurm nproc_per_node=1 cluster.requeue.crash=1"
        " cluster.node_order=slurm env.HF_TOKEN=sesame"
    )
    words = [*settings.split(), "name=a b", "cluster.setup=['export SET=it']", "env.A=1 '2"]
    program = ["--", "train.py", "$(id)", "it's", "", "--api-key", "sesame", "--token=sesame"]
    (tmp_path / "train.py").touch()
    dry = run_outside([*words, *program], tmp_path, environ)
    assert dry.code == 0 and "sesame" not in dry.out, dry
    assert "the script leaves out HF_TOKEN, SECRET_2, SECRET_3: export them before sbatch\n" in dry.err
    assert f"#SBATCH --chdir={tmp_path}\n" in dry.out and "#SBATCH --output=%x-%j.out\n" in dry.out
    assert "#SBATCH --requeue\n" in dry.out
    assert not (tmp_path / "runs").exists()
    script, run = tmp_path / "job.sh", tmp_path / "runs/a b/job-7"
    script.write_text(dry.out)
    environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": "2"}
    environ |= {"SLURMD_NODENAME": "n0", "HF_TOKEN": "sesame", "SECRET_2": "sesame"}

    def start(**more: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "facts/step.sh").write_text(step.replace("$folder/run/", f"{run}/"))
        both = {**environ, **more}
        return subprocess.run(
            ["bash", script], cwd=tmp_path, env=both, capture_output=True, text=True, check=False
        )

    assert "SECRET_3: the script leaves it out" in start().stderr and not run.exists()
    environ["SECRET_3"] = "sesame"
    first = start()
    manifest = json.loads((run / "manifest.json").read_text())
    assert (first.returncode, manifest["outcome"]["state"]) == (7, "requeued"), first
    assert "scontrol requeue 7" in (tmp_path / "calls").read_text()
    request = json.loads((run / "job.json").read_text())
    assert request["words"] == ["train.py", "$(id)", "it's", "", "--api-key", "***", "--token=***"]
    assert request["config"]["env"] == {"A": "1 '2", "HF_TOKEN": "***"} and manifest["slurm"]["job_id"] == "7"
    (tmp_path / "calls").unlink()
    second = start(SLURM_RESTART_COUNT="1")
    manifest = json.loads((run / "manifest.json").read_text())
    causes = [entry["outcome"]["cause"] for entry in (*manifest["earlier"], manifest)]
    assert (second.returncode, manifest["outcome"]["state"]) == (7, "failed"), second
    assert causes == ["crash", "crash"]
    assert "scontrol requeue" not in (tmp_path / "calls").read_text()
    assert [path.name for path in run.parent.iterdir()] == ["job-7"]
    assert "sesame" not in "".join(path.read_text() for path in run.glob("*.*"))


def play(
    first_nodes: "subprocess.Popen[str]",
    folder: Path,
    number: int,
    start: Mapping[str, Any],
    environ: Mapping[str, str],
) -> None:
    """Start the job's first node once, and look at what it has told and done."""
    run, slurm, expected = folder / "run", start.get("slurm", {}), start.get("expect", {})
    for name, lines in {**ANSWERS, **slurm}.items():
        write_answers(folder, name, [lines] if isinstance(lines, str) else lines)
    write_step(folder, start)
    (folder / "calls").write_text("")
    variables = {
        **{"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n0"},
        **({"SLURM_RESTART_COUNT": str(number)} if number else {}),
        **start.get("environ", {}),
    }
    line = json.dumps({"run": str(run), "environ": {**environ, **variables}, "folder": str(folder)})
    assert first_nodes.stdin and first_nodes.stdout
    first_nodes.stdin.write(f"{line}\n")
    first_nodes.stdin.flush()
    code, said = int(first_nodes.stdout.readline()), (folder / "err").read_text()
    calls = (folder / "calls").read_text().splitlines()
    changes = [call.removeprefix("scontrol ") for call in calls if call.startswith(CHANGES)]
    path = run / "manifest.json"
    manifest = json.loads(path.read_text()) if path.is_file() else {"outcome": {}}
    assert (number, code) == (number, expected.get("code", 0)), said
    assert expected.get("calls") == ["*"] or changes == expected.get("calls", []), said
    assert "Traceback" not in said and "report it" not in said
    assert_part(manifest["outcome"], expected.get("outcome", {}), "outcome")
    assert_part(manifest, expected.get("manifest", {}), "manifest")
    if "causes" in expected:
        entries = [*manifest["earlier"], manifest]
        assert [entry["outcome"].get("cause") or "" for entry in entries] == expected["causes"]
    if "reason" in expected:
        assert str(manifest["outcome"]["reason"]).startswith(expected["reason"]), manifest["outcome"]
    for part in expected.get("said", []):
        assert part in said, said
    for part in expected.get("unsaid", []):
        assert part not in said, said
    if "starts" in expected:
        assert sum("launcher.slurm.task" in call for call in calls) == expected["starts"]
