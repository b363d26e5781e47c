"""Compositions that are kept: the same values as Hydra's, until something changes that they depend on."""

import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config.composed import Composed, read_values, resolve
from launcher.config.composition import HydraValues
from launcher.config.composition_cache import ENDING, compose_cached
from launcher.config.composition_key import UncacheableError, make_key
from launcher.config.config_file import render_config
from launcher.config.search_path import find_sources
from launcher.config.stored_values import StoredValues
from launcher.errors import UsageError
from launcher.protocol import LAUNCH_CACHE
from tests.fuzzing import FUZZ
from tests.seam import clean_environ

KEYS = (
    "name",
    "runs_dir",
    "run_dir",
    "new_run_dir",
    "node_rank",
    "dry_run",
    "cluster.kind",
    "nodes",
    "objective",
)
CACHED: tuple[tuple[str, ...], ...] = (
    (),
    ("nodes=2:4", "name=x"),
    ("+model=gpt2", "program.steps=10"),
    ("model=llama7b", "binding=numa", "cluster=slurm", "cluster.time=10:00", "cluster.partition=a&b"),
    ("env.A=1e3", "env.B='two words'", "env.C="),
    ("cluster.additional.foo=1.0", "cluster.srun.bar=true", "allocator.max_split_size_mb=512"),
    ("dataloader=4", "gc=disabled", "gc.every=7", "watch.interval=3", "machine=dgx_h100"),
    ("program.command=[python,x.py,'a: b']", "+program.out=${run_dir}/out", "+program.n=${nodes}"),
    ("+program.text='made in ${run_dir} by me'",),
    ("run_dir=runs/x/1", "restarts=2", "start.preload=[transformers]"),
    ("cluster.requeue.exit_codes=[1,2]", "progress.paths=[/a/*,b]", "preflight=deep"),
    ("name=ü", "env.X=日本"),
    ("~data",),
    ("name=${program.steps}",),
    ("name=a${run_dir}",),
)
"""Command lines whose composition is kept."""
LATE = (("name=a${run_dir}",),)
"""Those of them that Hydra has to answer something of nevertheless."""
WORDS = (
    *(
        "nodes=1:2",
        "nodes='007'",
        "nodes=1.0",
        "nodes=null",
        "follow=yes",
        "restarts=1",
        "name=1e3",
        "name=null",
    ),
    *("model=gpt2", "model=tiny", "binding=none", "gc.every=0", "dataloader=vision", "dataloader=3"),
    *("program.steps=1e3", "+program.a=[1,2.0,x,null,true]", "+program.b={c: {d: 1}}", "+program.e='  '"),
    *("+program.f=inf", "+program.g=nan", "+program.h=${run_dir}", "+program.i='x: ${run_dir} #y'"),
    *(
        "+program.j='${name}/${run_dir}'",
        "+program.k='\\${run_dir}'",
        "+program.l=${model}",
        "+program.m=???",
    ),
    *("cluster.additional={a: 1, b: null}", "allocator=default", "watch.interval=2", "tune.max_workers=4"),
    *("run_dir=x", "run_dir=null", "new_run_dir=${runs_dir}/z", "fit.tokens=1e12", "machine=local"),
)
"""Settings that are put together at random."""
VALUES = st.sampled_from(
    (
        *("", " ", "1e3", "007", "null", "yes", "a,b", "[a]", "{a: b}", "it's", '"', "\\", "a=b", "#", "~"),
        *("- x", "\xfc", "${name}", "${run_dir}/x", "${run_dir} ${run_dir}", "\u2028", "\udc80", "token=abc"),
        *("hf_" + "a1" * 20, "!x", "&a"),
    )
)
"""Of variables."""
UNCACHED: tuple[tuple[str, ...], ...] = (
    ("env.HF_TOKEN=abc",),
    ("notify.url=https://x.org/hook",),
    ("program.command=[x.py,--api-key,abc]",),
    ("name=${oc.env:HOME}",),
    ("hydra.job.name=x",),
    ("hydra.verbose=true",),
    ("+program.data={password: x}",),
)
"""Command lines whose composition is not."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache of the test's own; the working directory is an empty one."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv(LAUNCH_CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def ask(*words: str) -> Composed:
    return compose_cached(find_sources(None, None, None), words, os.environ)


def is_stored(composed: Composed) -> bool:
    assert isinstance(composed.values, StoredValues | HydraValues)
    return isinstance(composed.values, StoredValues)


def list_kept(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{ENDING}")) if folder.is_dir() else []


def describe(composed: Composed, run_dir: Path | None) -> object:
    """All that a composition can be asked for, with types and order."""
    early = composed.values.select(KEYS)
    config = resolve(composed, run_dir)
    text = render_config(composed, ("model",)) if run_dir else ""
    plain = (composed.choices, composed.warnings, composed.given, composed.settings, composed.own_files)
    return repr((early, config, text, sorted(composed.given), plain[:2], plain[3:], composed.sources))


@pytest.mark.parametrize("words", CACHED, ids=str)
def test_what_is_kept_is_what_hydra_composes(words: Sequence[str]) -> None:
    first, second = ask(*words), ask(*words)
    assert (is_stored(first), is_stored(second)) == (False, True)
    for run_dir in (None, Path("/a/b-1.c/_d"), Path("/a b/'c: #d\xfc"), Path("/hf_" + "Aa1" * 20)):
        assert describe(second, run_dir) == describe(first, run_dir), run_dir
    assert (isinstance(second.values, StoredValues) and second.values.composed is None) or words in LATE


@settings(FUZZ, max_examples=max(20, FUZZ.max_examples // 6))
@given(st.lists(st.sampled_from(WORDS), max_size=3, unique=True), st.lists(VALUES, min_size=1, max_size=3))
def test_any_words_and_values(words: list[str], values: list[str]) -> None:
    words += [f"env.V{number}={value}" for number, value in enumerate(values)]
    try:
        composed = ask(*words)
    except UsageError:
        return
    again = ask(*words)
    for run_dir in (None, Path("/r/1"), Path("/r 1/#")):
        try:
            expected = describe(composed, run_dir)
        except UsageError as error:
            with pytest.raises(UsageError, match=re.escape(str(error))):
                describe(again, run_dir)
        else:
            assert describe(again, run_dir) == expected


@pytest.mark.parametrize("words", [(), ("run_dir=/runs/given",)])
def test_a_run_directory_that_another_run_has_taken_is_chosen_anew(words: Sequence[str]) -> None:
    for _ in range(2):  # Hydra's values, and those that are kept
        composed = ask(*words)
        first = read_values(composed, ("run_dir",))
        for path in (Path("/runs/1"), Path("/runs/2")):
            assert resolve(composed, path).run_dir == str(path)
            assert read_values(composed, ("run_dir",)) == first
        assert composed.tree.run_dir == "/runs/2"
        assert read_values(composed, ("run_dir",)) == first


def test_hydras_tree_is_there_if_it_is_asked_for() -> None:
    ask("nodes=2")
    found = ask("nodes=2")
    config = resolve(found, Path("/r/1"))
    found.tree.nodes = 3
    assert (config.nodes, resolve(found).nodes, resolve(found).run_dir) == (2, 3, "/r/1")
    assert "nodes: 3\n" in render_config(found)


@pytest.mark.parametrize("words", UNCACHED, ids=str)
def test_what_may_depend_on_more_or_hold_a_secret_is_not_kept(words: Sequence[str], cache: Path) -> None:
    assert not is_stored(ask(*words)) and list_kept(cache) == []


@pytest.mark.parametrize(
    "text",
    [
        "name: ${oc.env:HOME}\n",
        "env: {MY_TOKEN: abc}\n",
        "env: {A: 'https://me:secret@host/'}\n",
        "hydra: {verbose: true}\n",
        "name: ${hydra:job.name}\n",
        'name: "\\x24{oc.env:HOME}"\n',
        "defaults: [launch_defaults, override model: '${oc.env:MODEL,gpt2}', _self_]\n",
    ],
)
def test_files_of_ones_own_that_are_not_kept(text: str, cache: Path) -> None:
    write_primary(text)
    assert not is_stored(ask()) and list_kept(cache) == []


def write_primary(text: str) -> None:
    """A primary file of one's own in the working directory."""
    Path("conf").mkdir(exist_ok=True)
    if "defaults" not in text:
        text = f"defaults: [launch_defaults, _self_]\n{text}"
    Path("conf/launch.yaml").write_text(text)


def test_a_change_of_a_file_shows_at_once() -> None:
    write_primary("name: one\n")
    assert [resolve(ask()).name for _ in range(2)] == ["one", "one"]
    assert is_stored(ask())
    before = Path("conf/launch.yaml").stat()
    write_primary("name: two\n")
    os.utime("conf/launch.yaml", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [(is_stored(found), resolve(found).name) for found in (ask(), ask())] == [
        (False, "two"),
        (True, "two"),
    ]


def test_a_file_that_appears_comes_before_the_shipped_one() -> None:
    assert resolve(ask("model=gpt2")).model["layers"] == resolve(ask("model=gpt2")).model["layers"] != 1
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/gpt2.yaml").write_text("layers: 1\n")
    assert resolve(ask("model=gpt2")).model["layers"] == 1
    Path("conf/model/gpt2.yaml").unlink()
    assert resolve(ask("model=gpt2")).model["layers"] != 1


def test_the_key_tells_all_apart(tmp_path: Path) -> None:
    keys = [make_key(find_sources(None, None, None), words) for words in CACHED]
    os.chdir(tmp_path)
    keys.append(make_key(find_sources(None, None, None), ()))
    for step in ("conf", "conf/group", "conf/group/deeper"):
        Path(step).mkdir()
        keys.append(make_key(find_sources(None, None, None), ()))
    Path("conf/group/deeper/a.yaml").touch()
    keys.append(make_key(find_sources(None, None, None), ()))
    keys.append(make_key(find_sources(None, None, "other"), ()))
    keys.append(make_key(find_sources(None, str(tmp_path / "conf" / "group"), None), ()))
    assert len(set(keys)) == len(keys)
    Path("conf/circle").symlink_to(".")
    with pytest.raises(UncacheableError):
        make_key(find_sources(None, None, None), ())


def test_an_error_is_told_each_time() -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match="did you mean nodes"):
            ask("node=2")


def test_the_switch_and_folders_that_are_not_private(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(mode=0o700)
    cache.chmod(0o750)
    assert not is_stored(ask()) and not is_stored(ask()) and list_kept(cache) == []
    cache.chmod(0o700)
    assert not is_stored(ask()) and is_stored(ask())
    (kept,) = list_kept(cache)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    kept.chmod(0o640)
    assert not is_stored(ask()) and is_stored(ask())
    kept.rename(cache / "elsewhere")
    kept.symlink_to(cache / "elsewhere")
    assert not is_stored(ask()) and is_stored(ask()) and not kept.is_symlink()
    monkeypatch.setenv(LAUNCH_CACHE, "off")
    assert not is_stored(ask())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_cache_is_not_read(cache: Path) -> None:
    assert not is_stored(ask()) and is_stored(ask())
    (kept,) = list_kept(cache)
    os.chown(kept, 12345, -1)
    assert not is_stored(ask()) and is_stored(ask())
    os.chown(cache, 12345, -1)
    assert not is_stored(ask()) and not is_stored(ask())


def test_without_home_or_with_one_that_cannot_be_written(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LAUNCH_CACHE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for home in ("", "relative", "/no/such/home", "/proc/self"):
        monkeypatch.setenv("HOME", home)
        assert not is_stored(ask()) and not is_stored(ask())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not is_stored(ask()) and is_stored(ask())
    assert stat.S_IMODE((tmp_path / ".cache").stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    assert is_stored(ask())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"tree": {}}', "\0" * 9])
def test_a_damaged_entry_is_written_anew(text: str, cache: Path) -> None:
    ask()
    (kept,) = list_kept(cache)
    kept.write_text(text)
    assert not is_stored(ask()) and is_stored(ask())


def test_values_of_another_type_in_an_entry_are_not_taken(cache: Path) -> None:
    ask()
    (kept,) = list_kept(cache)
    entry = json.loads(kept.read_text())
    entry["tree"]["follow"] = "no"
    kept.write_text(json.dumps(entry))
    assert resolve(ask()).follow is False


def test_old_entries_and_drafts_go(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.config.composition_cache.MOST_ENTRIES", 2)
    ask()
    (kept,) = list_kept(cache)
    for name, age in ((kept.name, 40), (".launch-0", 1), ("another-tools", 99)):
        (cache / name).touch()
        os.utime(cache / name, (time.time() - age * 86400,) * 2)
    for number in range(3):
        assert not is_stored(ask(f"nodes={number + 1}"))
    assert len(list_kept(cache)) == 2 and not kept.exists()
    assert [path.name for path in cache.iterdir() if path not in list_kept(cache)] == ["another-tools"]
    assert is_stored(ask("nodes=3")) and not is_stored(ask())


def test_hydra_is_not_loaded_for_what_is_kept(tmp_path: Path) -> None:
    Path("x.py").touch()
    loaded = []
    script = """
import sys
from launcher.cli.main import run_guarded
assert run_guarded(sys.argv[1:]) == 0
print("LOADED", *sys.modules)
"""
    for words in (["dry_run=true", "nproc_per_node=1", "--", "x.py"], ["plan", "format=json"], ["status"]):
        for _ in range(2):
            environ = clean_environ() | {LAUNCH_CACHE: os.environ[LAUNCH_CACHE]}
            done = subprocess.run(
                [sys.executable, "-c", script, *words],
                env=environ,
                capture_output=True,
                text=True,
                check=True,
            )
            loaded.append(set(done.stdout.splitlines()[-1].split()))
    for first, second in zip(loaded[::2], loaded[1::2], strict=True):
        assert {"hydra", "omegaconf"} <= first
        assert not {"hydra", "omegaconf", "antlr4", "yaml"} & second


def test_a_start_loads_little_until_the_ranks_are_started() -> None:
    Path("x.py").touch()
    script = """
import os, sys
from launcher.agent.direct_agent import DirectAgent
def begin(self):
    print("LOADED", *sys.modules, flush=True)
    os._exit(0)
DirectAgent.begin = begin
sys.argv[0] = "launch"
from launcher.cli.main import main
main()
"""
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script, "agent=direct", "nproc_per_node=1", "x.py"],
            env=clean_environ(),
            capture_output=True,
            text=True,
            check=True,
        )
    loaded = set(done.stdout.split())
    assert {"launcher.agent.local_agent", "launcher.plan.planner"} <= loaded
    heavy = {
        "hydra",
        "omegaconf",
        "antlr4",
        "yaml",
        "rich",
        "psutil",
        "asyncio",
        "torch",
        "numpy",
        "submitit",
    }
    assert not {name.partition(".")[0] for name in loaded} & heavy
