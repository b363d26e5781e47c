"""Run directories that hold anything: verbs end cleanly, write nowhere else, and end no process of others."""

import contextlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.cli.main import Call, call_verb
from launcher.config.settings import Settings
from launcher.errors import LaunchError
from launcher.files import open_append, open_below
from launcher.rank.affinity import Applied
from launcher.rank.entry import Identity, PlanEntry
from launcher.rank.shim import write_record
from launcher.runs.records import NodeRecord, write_node
from launcher.runs.run_directory import (
    RunDir,
    RunIdTakenError,
    create_run_dir,
    open_run_dir,
    write_private,
)
from launcher.slurm.commands import JobState
from tests.cli.make_runs import identify_process
from tests.fuzzing import SEQUENCES, Terminal, assert_harmless, scalars, texts
from tests.strangers import STRANGER

ID = "20260801-120000"
WRITTEN = """
manifest.json config.yaml job.json submission.sh plan-box.json rank-0.applied.json report.html checkpoints
logs logs/0 logs/0/rank-0.out logs/0/rank-0.err logs/0/rank-x.out logs/0/node-box.json logs/agent-box.log
logs/slurm-12.out logs/7 logs/latest watch/node-box.json watch/metrics-box.jsonl watch/job.json
hang-1/verdict.json
"""
"""What `launch` reads or writes in a run directory."""
LINKS = ("link to a file", "link to a directory", "link to nothing", "link to itself")
KINDS = ("file", "directory", "pipe", *LINKS)
states = st.sampled_from(["running", "submitted", "requeued", "failed", "succeeded", "stopped", "x"])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
words = texts | values
failures = st.fixed_dictionaries(
    {"rank": words, "host": words, "reason": words, "last_lines": st.lists(texts)}
)
outcomes = st.fixed_dictionaries(
    {"state": states, "cause": words, "reason": words},
    optional={"signal": words, "exit_code": values, "first_failure": failures | values, "lost": values},
)
processes = st.just("victim") | st.fixed_dictionaries({"host": words, "pid": words}) | values
jobs = st.fixed_dictionaries({"job_id": st.just("12") | values}) | values
earlier = st.lists(st.fixed_dictionaries({"outcome": outcomes, "started": texts}), max_size=2)
manifests = st.fixed_dictionaries(
    {
        "outcome": outcomes,
        "command": st.lists(texts, max_size=2) | values,
        "hosts": st.lists(texts, max_size=2),
    },
    optional={
        "process": processes,
        "slurm": jobs,
        "earlier": earlier | values,
        **dict.fromkeys(("started", "ended", "submitted", "schema", "id", "name"), words),
    },
)
contents = st.one_of(
    manifests.map(json.dumps).map(str.encode),
    values.map(json.dumps).map(str.encode),
    texts.map(lambda text: text.encode("utf-8", "replace")),
    st.binary(max_size=40),
    st.sampled_from([b"[" * 5000, b"{" * 5000, b'{"a":' * 5000, b"9" * 5000, b"step 1/2 loss 1\n" * 500]),
)


@dataclass(frozen=True, slots=True)
class Planted:
    """One file that somebody has planted."""

    kind: str
    data: bytes
    foreign: bool


planted = st.builds(
    Planted, st.sampled_from(("file",) * 6 + KINDS), contents, st.sampled_from([False, False, True])
)
files = st.builds(Planted, st.just("file"), manifests.map(json.dumps).map(str.encode), st.just(value=False))
runs = st.fixed_dictionaries(
    {"manifest.json": files, "logs": st.just(Planted("directory", b"", foreign=False))}
)
trees = st.builds(
    lambda run, tree: {**run, **tree},
    runs | st.just({}),
    st.dictionaries(st.sampled_from([*WRITTEN.split(), ""]), planted, max_size=6),
)


@pytest.fixture(scope="module")
def victim() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of this user's that is no business of `launch`."""
    process = subprocess.Popen(["sleep", "100000"])
    yield process
    process.kill()
    process.wait()


class Place:
    """A folder with runs in it, and something beside it that nobody is to touch."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self.run = self.folder / "runs/tiny" / ID
        (self.folder / "canary/inner").mkdir(parents=True)
        (self.folder / "canary/file").write_text("canary")
        self.before = self.look()

    def look(self) -> dict[str, object]:
        paths = sorted((self.folder / "canary").rglob("*"))
        return {str(p): (p.lstat().st_mode, p.lstat().st_uid, p.is_file() and p.read_bytes()) for p in paths}

    def plant(self, tree: dict[str, Planted]) -> None:
        self.run.parent.mkdir(parents=True)
        if "" not in tree:
            self.run.mkdir()
        for name in sorted(tree):  # what is above comes first
            if not any(above.is_symlink() for above in (self.run / name).parents):
                with contextlib.suppress(OSError):  # a file where a directory would have to be
                    make(self.run / name, tree[name], self.folder / "canary")


def make(path: Path, each: Planted, canary: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() or path.is_symlink():
        return
    if each.kind == "file":
        path.write_bytes(each.data)
    elif each.kind == "directory":
        path.mkdir()
    elif each.kind == "pipe":
        os.mkfifo(path)
    else:
        target = {"file": canary / "file", "directory": canary, "nothing": canary / "new", "itself": path}
        path.symlink_to(target[each.kind.rpartition(" ")[2]])
    if each.foreign and os.geteuid() == 0:
        os.lchown(path, STRANGER, STRANGER)


@contextlib.contextmanager
def make_place(tree: dict[str, Planted]) -> Iterator[Place]:
    place = Place()
    try:
        place.plant(tree)
        yield place
        led = place.run.is_symlink() and place.run.lstat().st_uid != STRANGER
        assert led or place.look() == place.before, "something beside the runs was written to"
    finally:
        shutil.rmtree(place.folder)


def name_victim(tree: dict[str, Planted], victim: "subprocess.Popen[bytes]") -> dict[str, Planted]:
    """Have manifests tell of the victim where they tell of a process."""
    record = json.dumps(identify_process(victim.pid)).encode()
    return {name: replace(each, data=each.data.replace(b'"victim"', record)) for name, each in tree.items()}


def run_verb(verb: str, place: Place, names: list[str], **settings: object) -> tuple[int, str]:
    """Run a verb as on a terminal; what it refuses is an error of `launch`'s own."""
    out, err = Terminal(), Terminal()
    call = Call(verb, names=names)
    call.config = replace(Settings(), runs_dir=str(place.folder / "runs"), yes=True, **settings)  # type: ignore[arg-type]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = call_verb(call)
        except LaunchError as error:
            logging.getLogger("launcher.cli").error(str(error))  # as the command line tells of it
            code = error.exit_code
    return code, out.getvalue() + err.getvalue()


RUNNING = JobState("12", "RUNNING", "", "part", 1, "box", "", 0, None)
EVIL = "".join(SEQUENCES).replace("\ud800", "")
TOLD = {"state": "failed", "cause": EVIL, "reason": EVIL}
HOSTILE = Planted(
    "file", json.dumps({"outcome": TOLD, "hosts": [EVIL], "command": [EVIL]}).encode(), foreign=False
)
LIVE = Planted("file", b'{"outcome": {"state": "running"}, "process": "victim"}', foreign=False)
JOB = Planted("file", b'{"outcome": {"state": "submitted"}, "slurm": {"job_id": "12"}}', foreign=True)


@given(tree=trees)
@example(tree={"manifest.json": LIVE})
@example(tree={"manifest.json": replace(LIVE, foreign=True)})
@example(tree={"manifest.json": LIVE, "": Planted("directory", b"", foreign=True)})
@example(tree={"manifest.json": JOB})
@example(tree={"manifest.json": HOSTILE, "logs/0/rank-0.out": Planted("file", EVIL.encode(), foreign=False)})
def test_verbs(victim: "subprocess.Popen[bytes]", tree: dict[str, Planted]) -> None:
    cancelled: list[object] = []
    with pytest.MonkeyPatch.context() as patch, make_place(name_victim(tree, victim)) as place:
        patch.setattr("launcher.cli.runs.run_slurm", cancelled.append)
        patch.setattr("launcher.slurm.run_states.ask_queue", lambda _: {"12": RUNNING})
        patch.setattr("launcher.cli.runs.ask_queue", lambda _: {})
        for verb, names, settings in (
            ("status", [], {}),
            ("status", [str(place.run)], {}),
            ("status", ["tiny"], {"format": "json"}),
            ("logs", [str(place.run)], {}),
            ("logs", [str(place.run)], {"rank": 0}),
            ("report", [str(place.run)], {}),
            ("cancel", [str(place.run)], {}),
        ):
            code, said = run_verb(verb, place, names, **settings)
            assert code in (0, 2, 3), (verb, said)
            assert_harmless(said)
            assert settings.get("format") != "json" or code or json.loads(said)
        assert victim.poll() is None, "it was killed"
        foreign = os.geteuid() == 0 and any(
            tree[name].foreign for name in ("", "manifest.json") if name in tree
        )
        assert not (foreign and cancelled), "a job was cancelled that another user has named"


def write_rank(path: Path) -> None:
    """What the shim writes for a rank."""
    identity = Identity({"LOCAL_RANK": "0"})
    entry = {"cpus": "0", "memory": {"policy": "default"}, "num_workers": 1, "env": {}, "gpu": None}
    share = PlanEntry(entry)
    applied = object.__new__(Applied)
    applied.cpus, applied.nodes, applied.policy, applied.problems = frozenset({0}), frozenset(), "default", []
    write_record(str(path), identity, share, applied, dict(os.environ))
    at = open_below(str(path), "logs", "0")
    try:
        for ending in ("out", "err"):
            descriptor = open_append(at, f"rank-0.{ending}")
            os.write(descriptor, b"written\n")
            os.close(descriptor)
    finally:
        os.close(at)


@given(tree=trees)
@example(tree={"": Planted("link to a directory", b"", foreign=True)})
@example(tree={"": Planted("directory", b"", foreign=True)})
@example(tree={"logs": Planted("link to a directory", b"", foreign=False)})
@example(tree={"logs/0": Planted("link to a directory", b"", foreign=False)})
@example(tree={"logs/0/rank-0.out": Planted("link to a file", b"", foreign=False)})
@example(tree={"config.yaml": Planted("link to a file", b"", foreign=False)})
@example(tree={"logs/0/rank-0.err": Planted("link to nothing", b"", foreign=False)})
def test_writers_write_into_the_run_directory_alone(tree: dict[str, Planted]) -> None:
    with make_place(tree) as place:
        run, strange = RunDir(place.run), list_strange(place.run)
        record = NodeRecord("box", 0, "failed", 1, None, "", None, 0, 0.0, 0.0)
        for write in (
            lambda: open_run_dir(place.run, None),
            lambda: open_run_dir(place.run, 0),
            lambda: create_run_dir(place.folder / "runs/tiny" / ID),
            lambda: write_private(run.manifest_path, "{}"),
            lambda: write_private(run.path / "config.yaml", "x"),
            lambda: write_node(run.path, 0, record),
            lambda: write_rank(run.path),
        ):
            with contextlib.suppress(OSError, RunIdTakenError):
                write()
        assert list_strange(place.run) == strange, "something was written into another user's directory"


def list_strange(path: Path) -> dict[Path, list[str]]:
    """What is in directories of another user."""
    found = [path, path / "logs", path / "logs/0"]
    found = [each for each in found if each.is_dir() and each.lstat().st_uid == STRANGER]
    return {each: sorted(inner.name for inner in each.iterdir()) for each in found}
