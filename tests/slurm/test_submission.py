"""Jobs that are submitted, by made-up commands of SLURM's: the script, run by a real bash, the environment of
sbatch, what the job finds in its run directory, and the memory that is judged before."""

import fcntl
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LaunchError
from launcher.protocol import LAUNCH_SECRETS
from launcher.slurm.job_request import read_job_request
from tests.cli.make_runs import read_nodes
from tests.seam import PATIENCE, Result, clean_environ, enter, run_inside, run_outside, specify, write_script

HERE = Path(__file__).parent
SETUP = tomllib.loads((HERE / "options.toml").read_text())["setup"]
ENVIRONMENT = tomllib.loads((HERE / "refusals.toml").read_text())["environment"]
SBATCH = 'env -0 >{folder}/environ; cp "$1" {folder}/script; echo Submitted batch job 7'
SINFO = "main*|8|128|2:32:2|1000000|{gpu}:8|(null)|UNLIMITED"
FAKE = 'printf "%s|" "$@"\nprintf "X=%s\\n" "$X"\nenv | grep "^launch_"\nexit 7'
"""In place of the interpreter: shows its words, the variables of ours that it got, and one of setup's."""


class LoginNode:
    """A user's shell on a login node, in a folder of its own."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        enter(folder, patch)
        self.folder, self.patch = folder, patch
        (folder / "bin").mkdir()
        patch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")
        self.command("srun", "")
        self.command("sinfo", "")
        self.command("sbatch", SBATCH.format(folder=folder))

    def command(self, name: str, text: str) -> None:
        """Make one of SLURM's commands."""
        write_script(self.folder / "bin" / name, text)

    def submit(
        self, *words: str, cluster: Mapping[str, Any] | None = None, program: tuple[str, ...] = ()
    ) -> Result:
        """Submit a job of a site's settings."""
        (self.folder / "conf/cluster").mkdir(parents=True, exist_ok=True)
        settings = {"kind": "slurm", "gpus_per_node": 0, **(cluster or {})}
        (self.folder / "conf/cluster/ours.yaml").write_text(json.dumps(settings))
        after = ("--", *(program or ("true",))) if program != ("bundled",) else ()
        return run_inside(["cluster=ours", *words, *after])

    def make_script(self, *words: str, **cluster: object) -> str:
        """Submit a job, and return its script with another interpreter."""
        done = self.submit(*words, cluster=cluster)
        assert done.code == 0, done
        write_script(self.folder / "python", FAKE)
        text = (self.folder / "script").read_text(encoding="utf-8")
        return text.replace(sys.executable, str(self.folder / "python"))

    def run(self, text: str, **environ: str) -> tuple[int, str, str]:
        """Run a script, and return its exit code, output and errors."""
        (self.folder / "job.sh").write_text(text, encoding="utf-8")
        done = subprocess.run(
            ["bash", "job.sh"],
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], **environ},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    @property
    def run_path(self) -> Path:
        """The one run directory."""
        (path,) = self.folder.glob("runs*/*/*")
        return path

    def read_environ(self) -> dict[str, str]:
        """What sbatch got."""
        pairs = (self.folder / "environ").read_text().split("\0")
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def assert_refused(done: Result, code: int, *parts: str) -> None:
    """Assert that the last line is our error, with these parts."""
    line = done.err.splitlines()[-1]
    assert (done.code, done.out) == (code, "") and line.startswith("launch: error: "), done
    assert all(part in line for part in parts), line


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoginNode:
    return LoginNode(tmp_path, monkeypatch)


def test_what_sbatch_reads(login: LoginNode) -> None:
    comment = """a "b" c\\d 'e' #f $(id) hetjob ü"""
    words = ("nodes=2:4", "name=x y", 'runs_dir="runs\'s 100%"')
    text = login.make_script(*words, nodelist="n[0-3],n7", additional={"comment": comment, "wckey": "hetjob"})
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash" and lines[1].startswith("# Made by: launch cluster=ours nodes=2:4")
    assert {
        '#SBATCH --comment="a \\"b\\" c\\\\d \'e\' #f $(id) hetjob ü"',
        '#SBATCH --wckey="hetjob"',
        "#SBATCH --nodes=2-4",
        "#SBATCH --no-kill",
        "#SBATCH --nodelist=n[0-3],n7",
        "#SBATCH --signal=B:USR2@120",
        "#SBATCH --open-mode=append",
        f'#SBATCH --output="{login.run_path}/logs/slurm-%j.out"'.replace("100%", "100%%"),
    } <= {*lines}
    assert login.run(text) == (7, f"-I|-m|launcher.slurm|{login.run_path}|X=\n", "")
    assert_refused(login.submit("runs_dir='a\\b'"), 2, "run directory", "set runs_dir")


def test_the_users_lines_do_not_break_ours_and_one_that_fails_ends_the_job(login: LoginNode) -> None:
    for number, setup in enumerate(SETUP["right"]):
        text = login.make_script(f"new_run_dir=right-{number}", setup=setup)
        shown = "it's" if "export X=it\\'s" in setup else ""
        expected = f"-I|-m|launcher.slurm|{login.folder}/right-{number}|X={shown}\n"
        assert login.run(text) == (7, expected, ""), setup
    for number, (code, line, setup) in enumerate(SETUP["wrong"]):
        text = login.make_script(f"new_run_dir=wrong-{number}", setup=setup)
        found, out, err = login.run(text)
        assert (found, out) == (code, ""), (setup, err)
        shown_code = 0 if setup == ["exit 0"] else code
        assert f"launch: error: cluster.setup ended with {shown_code} at: {line}\n" in err


def test_the_script_on_a_node(login: LoginNode) -> None:
    """The checkpoint signal during setup reaches the first node: bash handles it, and goes on."""
    text = login.make_script(setup=["kill -USR2 $$; true", "set -u"])
    missing = text.replace(str(login.folder / "python"), "/no/such/python")
    code, _, err = login.run(missing)
    assert code == 3 and err.startswith("launch: error: no /no/such/python on this node")
    write_script(login.folder / "python", "kill -USR2 $$\necho $*")
    assert login.run(text) == (0, f"-I -m launcher.slurm {login.run_path} USR2\n", "")
    for name in ("random.py", "json.py", "launcher.py"):  # in the working directory, they do not shadow ours
        (login.folder / name).write_text("raise SystemExit('shadowed')")
    real = text.replace(str(login.folder / "python"), sys.executable)
    for path in ({}, {"PYTHONPATH": ":"}, {"PYTHONPATH": "."}):
        code, out, err = login.run(real.replace(str(login.run_path), "/no/such/run"), **path)
        assert code != 0 and "shadowed" not in err + out and "/no/such/run" in err


def test_a_member_of_an_array_has_its_own_directory(login: LoginNode) -> None:
    text = login.make_script("-m", "+env.A=1,2", setup=["echo setup"])
    assert "#SBATCH --output=/dev/null\n" in text and "#SBATCH --array=0-1%" in text
    runs = sorted(login.folder.glob("runs/*/*"))
    assert login.run(text, SLURM_ARRAY_TASK_ID="1", SLURM_JOB_ID="99") == (7, "", "")
    log = runs[1] / "logs" / "slurm-99.out"
    assert log.read_text() == f"setup\n-I|-m|launcher.slurm|{runs[1]}|X=\n"
    assert not list((runs[0] / "logs").iterdir())
    dry = login.submit("-m", "+env.A=1,2", "dry_run=true")
    assert dry.code == 0 and "--array" not in dry.out and "env.A=1" in dry.out, dry
    assert "of these 2 jobs, the script of the first is shown\n" in dry.err
    requests = [read_job_request(run, {}) for run in runs]
    assert [request.config.env["A"] for request in requests] == ["1", "2"]


def test_the_environment_of_sbatch(login: LoginNode) -> None:
    for name in (*ENVIRONMENT["go"], *ENVIRONMENT["stay"]):
        login.patch.setenv(name, "nvme:1")
    options = {"time": "10", "mem": "10G", "cpus_per_task": 1, "partition": "main", "switches": "1"}
    assert login.submit(cluster=options).code == 0
    kept = {*login.read_environ()}
    assert not {*ENVIRONMENT["go"]} & kept
    assert {*ENVIRONMENT["stay"]} - {"SBATCH_PARTITION", "SBATCH_TIMELIMIT"} <= kept
    assert login.submit("new_run_dir=b", cluster={"mem": None, "cpus_per_task": None}).code == 0
    assert {*ENVIRONMENT["stay"]} <= {*login.read_environ()}, "defaults of what is not given"
    for enclosing in (ENVIRONMENT["job"], ENVIRONMENT["rank"]):  # nothing of an enclosing job or rank
        for name, value in enclosing.items():
            login.patch.setenv(name, value)
        assert login.submit(f"new_run_dir=c-{len(enclosing)}").code == 0
        assert not {*enclosing} & {*login.read_environ()}


def test_what_keeps_sbatch_from_starting_is_told(login: LoginNode) -> None:
    login.patch.setenv("PATH", f"{login.folder}/bin")
    (login.folder / "bin/srun").unlink()
    assert_refused(login.submit(program=("/bin/true",)), 4, "there is no srun on PATH")
    login.command("srun", "")
    login.patch.setenv("PATH", f"{login.folder}/bin:/usr/bin:/bin")
    login.command("sbatch", "echo 'sbatch: error: Batch job submission failed: no such thing' >&2; exit 1")
    assert_refused(login.submit(), 4, "sbatch: Batch job submission failed: no such thing: change cluster.* ")
    assert not (login.folder / "runs").exists(), "a job that is refused leaves no run directory"


WORDS = ("train.py", "--name", "a b\n$(c) 'é\"", "--api-key", "word-secret", "--token=part-secret")


def test_the_job_gets_what_was_asked_for_and_no_secret_is_written(login: LoginNode) -> None:
    (login.folder / "train.py").touch()
    secrets = ("+env.HF_TOKEN=env-secret", "+env.A=1", "notify.url=https://example.org/hook-secret")
    done = login.submit("nodes=2:4", *secrets, program=WORDS)
    assert done.code == 0, done
    environ, run = login.read_environ(), login.run_path
    request = read_job_request(run, environ)
    assert (request.words, request.min_nodes, request.max_nodes) == (WORDS, 2, 4)
    assert request.config.env == {"HF_TOKEN": "env-secret", "A": "1"}
    assert str(request.config.notify.url).endswith("hook-secret") and request.directory == str(login.folder)
    texts = {path: path.read_text() for path in run.glob("*.*")}
    assert "secret" not in "".join(texts.values()) and "HF_TOKEN" in texts[run / "job.json"]
    assert (run / "job.json").stat().st_mode & 0o777 == 0o600
    other = read_job_request(
        run, {LAUNCH_SECRETS: json.dumps({"/elsewhere": json.loads(environ[LAUNCH_SECRETS])})}
    )
    assert other.config.env == {"HF_TOKEN": "***", "A": "1"}, "those of another run are not taken"
    for text in ("", "{", "[]", "null", '{"config": {}}'):
        (run / "job.json").write_text(text)
        with pytest.raises(
            LaunchError, match=r"job\.json cannot be read on .*: is the run directory on a"
        ) as told:
            read_job_request(run, {})
        assert told.value.exit_code == 3


STARTED = """
{sbatch}
run=$(echo {folder}/runs/*/*)
(flock 9; echo >{folder}/held; sleep 1
 sed -i 's/"submitted"/"running"/' "$run/manifest.json") 9<"$run/job.json" >/dev/null 2>&1 &
while [ ! -e {folder}/held ]; do sleep 0.01; done
"""
"""The job starts at once, and writes its manifest while it has the lock."""


def test_a_manifest_that_the_job_has_written_meanwhile_stays(login: LoginNode) -> None:
    folder = login.folder
    login.command("sbatch", STARTED.format(folder=folder, sbatch=SBATCH.format(folder=folder)))
    assert login.submit().code == 0
    manifest = json.loads((login.run_path / "manifest.json").read_text())
    assert manifest["outcome"]["state"] == "running" and "slurm" not in manifest
    with (login.run_path / "job.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


SET = ("program.batch_size=8", "program.activation_checkpointing=none")
AUTO = ("program.batch_size=auto", "program.activation_checkpointing=auto")


def judge(login: LoginNode, *words: str, machine: str | None = "dgx_a100", asked: int = 8) -> Result:
    """Submit a llama13b to nodes of this kind."""
    cluster = {"gpus_per_node": asked, "machine": machine}
    return login.submit("+model=llama13b", "nodes=2", *words, cluster=cluster, program=("bundled",))


def test_a_job_that_cannot_fit_is_refused_if_the_nodes_are_known(login: LoginNode) -> None:
    refused = judge(login, *SET)
    assert_refused(refused, 3, "does not fit: each GPU (NVIDIA A100-SXM4-40GB", "fit.check=warn")
    done = judge(login, *SET, machine=None)
    assert done.code == 0 and "the first node judges whether the model fits" in done.err
    assert read_job_request(login.run_path, {}).fit_model


def test_the_gpus_that_sinfo_names_are_judged(login: LoginNode) -> None:
    """The first node judges once more, and chooses what is auto: it knows which of them the job has."""
    small, small_batch = "gpu:a100_40gb", ("program.batch_size=2", SET[1])
    large_batch = ("program.batch_size=64", "program.grad_accumulation=2", SET[1])

    def ask(number: int, gpus: str, *words: str, asked: int = 8) -> Result:
        kinds = "".join(f"echo '{SINFO.format(gpu=gpu)}'\n" for gpu in gpus.split())
        login.command("sinfo", kinds)
        return judge(login, f"new_run_dir=run-{number}", *words, machine=None, asked=asked)

    refused = ask(0, small, *SET)
    assert_refused(refused, 3, "llama13b does not fit: each GPU (a100 40gb", "program.", "fit.check=warn")
    # The largest type that the job may get counts, and nothing is refused for what is not known.
    for number, gpus in enumerate(("gpu:v100 gpu:b200", f"{small} gpu:new9000", "gpu", "gpu:h100"), 1):
        done = ask(number, gpus, *(AUTO if number == 4 else small_batch))
        request = read_job_request(login.folder / f"run-{number}", {})
        assert done.code == 0 and request.fit_model, gpus
        assert number < 4 or (request.config.program["batch_size"], "chosen" in done.err) == ("auto", False)
    # Of several GPUs of a name the largest counts, and ranks have the GPUs that are asked for.
    for name, size in {"a100": "80.0", "v100": "32.0", "h100": "93.6", "a100_80gb_pcie": "80.0"}.items():
        refused = ask(9, f"gpu:{name}", *large_batch, asked=4)
        assert_refused(refused, 3, f"{size} GiB")
        assert name == "v100" or "program.grad_accumulation=128" in refused.err


def test_the_content_of_a_config_json_goes_with_a_job(login: LoginNode) -> None:
    fields = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
    fields |= {"intermediate_size": 128, "max_position_embeddings": 64}
    (login.folder / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    (login.folder / "train.py").touch()
    expected = specify(["model.config=config.json"], ("train.py",)).fit_model
    assert login.submit("model.config=config.json", program=("train.py",)).code == 0
    (login.folder / "config.json").unlink()
    request = read_job_request(login.run_path, login.read_environ())
    assert request.fit_model == expected and not request.config.program
    assert expected and expected.layers == 2


def test_what_is_chosen_at_the_submission_goes_with_the_job(login: LoginNode) -> None:
    assert judge(login, *AUTO).code == 0
    request = read_job_request(login.run_path, {})
    program = request.config.program
    assert request.fit_model is None
    assert (program["activation_checkpointing"], program["parallel"]) == ("full", "fsdp")
    assert program["batch_size"] * program["grad_accumulation"] * 16 == 1024
    assert f"batch_size: {program['batch_size']}" in (login.run_path / "config.yaml").read_text()


def test_the_first_node_judges_what_the_submission_could_not(login: LoginNode) -> None:
    assert judge(login, "fit.gpu=A100-40GB", "nproc_per_node=1", *SET, machine=None, asked=1).code == 0
    run = login.run_path
    task = {"SLURMD_NODENAME": "localhost", "SLURM_JOB_ID": "7", "LAUNCH_ATTEMPT": "0"}
    subprocess.run(
        [sys.executable, "-P", "-m", "launcher.slurm.task", str(run)],
        env={**clean_environ(), **task},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=100,
        check=False,
    )
    (record,) = read_nodes(run, 0)
    assert record["exit_code"] == 3 and "llama13b does not fit" in record["agent_said"]


def test_an_interpreter_that_finds_launch_by_pythonpath_alone(login: LoginNode) -> None:
    bare, root = login.folder / "bare", Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    paths = [str(root), *(path for path in sys.path if path.endswith("site-packages"))]
    login.patch.setenv("PYTHONPATH", os.pathsep.join(paths))
    login.patch.setattr("tests.seam.LAUNCH", (str(bare / "bin/python"), "-m", "launcher"))
    done = run_outside(
        ["cluster=slurm", "nproc_per_node=1", "cluster.gpus_per_node=0", "--", "true"],
        login.folder,
        {**os.environ},
    )
    assert done.code == 0, done
    assert f"exec {bare}/bin/python -P -m launcher.slurm " in (login.folder / "script").read_text()
