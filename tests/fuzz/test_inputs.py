"""Files that users name or start beside: whatever they hold, an answer comes soon, and it is clean."""

import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.config import sources
from launcher.config.environment_files import read_variables
from launcher.config.request import load_snapshot
from launcher.config.sources import MOST_NODES, count_nodes, limit_work, read_yaml
from launcher.errors import UsageError
from launcher.files import read_input
from launcher.rank.entry import PlacementError, PlanEntry, read_plan_file
from tests.fuzzing import SEQUENCES, scalars, texts
from tests.seam import clean_environ, run_inside

names = st.sampled_from(
    ["a", "b", "c", "schema", "kind", "machine", "cpus", "ranks", "gpus", "nodes", "name"]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | texts, inner, max_size=4),
    max_leaves=20,
)
data = st.one_of(
    values.map(lambda value: json.dumps(value).encode()),
    texts.map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.binary(max_size=200),
    st.lists(st.tuples(names, texts), max_size=4).map(
        lambda pairs: "\n".join(f"{name}={text}" for name, text in pairs).encode("utf-8", "surrogatepass")
    ),
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One working directory for all examples."""
    before, found = Path.cwd(), Path(tempfile.mkdtemp())
    os.chdir(found)
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(clean_environ()):
            patch.delenv(name)
        patch.setattr(sources, "limit_work", lambda _: limit_work(0.5))
        yield found
    os.chdir(before)
    shutil.rmtree(found)


@given(content=data)
@example(content=b"[" * 100_000)
@example(content=b"9" * 100_000)
@example(content=b"A='" * 100_000)
def test_what_users_name(folder: Path, content: bytes) -> None:
    path = folder / "file"
    path.write_bytes(content)
    for read in (read_variables, load_snapshot):
        with contextlib.suppress(UsageError):
            read(str(path))
    with contextlib.suppress(PlacementError, KeyError, TypeError, ValueError, AttributeError):
        PlanEntry(read_plan_file(str(path)))


@settings(max_examples=max(8, settings().max_examples // 4))
@given(parts=st.lists(st.binary(min_size=1, max_size=300), max_size=5))
def test_pipes_give_all_that_was_written(folder: Path, parts: list[bytes]) -> None:
    path = folder / "pipe"
    os.mkfifo(path)

    def write() -> None:
        with path.open("wb", buffering=0) as pipe:
            for part in parts:
                pipe.write(part)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert read_input(path, 4096) == b"".join(parts)
    finally:
        writer.join()
        path.unlink()


def grow(levels: int, width: int, form: str) -> str:
    """Entries of which each stands `width` times for the one before it."""
    lines = ["a0: &a0 {x: 1, y: 2}" if form == "merge" else "a0: &a0 [x, x]"]
    for level in range(1, levels + 1):
        items = ", ".join([f"*a{level - 1}"] * width)
        if form == "merge":
            lines.append(f"a{level}: &a{level} {{<<: [{items}], z{level}: 1}}")
        elif form == "map":
            pairs = ", ".join(f"k{number}: *a{level - 1}" for number in range(width))
            lines.append(f"a{level}: &a{level} {{{pairs}}}")
        else:
            lines.append(f"a{level}: &a{level} [{items}]")
    return "\n".join(lines) + "\n"


forms = st.sampled_from(["list", "map", "merge"])


def count(value: object) -> int:
    """Count what a value holds, all of it."""
    if isinstance(value, dict):
        return 1 + sum(1 + count(item) for item in value.values())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


@given(levels=st.integers(0, 12), width=st.integers(1, 9), form=forms)
def test_aliases_are_counted_before_they_are_put_in(folder: Path, levels: int, width: int, form: str) -> None:
    path = folder / "x.yaml"
    path.write_text(grow(levels, width, form))
    root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    counted = count_nodes(root, {}) if root else 0
    try:
        value = read_yaml(path)
    except UsageError as error:
        assert counted > MOST_NODES and "aliases" in str(error)
        return
    assert counted <= MOST_NODES
    assert form == "merge" or counted == count(value)


@settings(max_examples=max(8, settings().max_examples // 10))
@given(
    levels=st.integers(0, 12),
    width=st.integers(1, 12),
    form=st.sampled_from(["list", "map", "merge", "reference", "default"]),
    noise=st.lists(st.sampled_from(SEQUENCES), max_size=2).map("".join),
)
@example(levels=9, width=10, form="list", noise="")
@example(levels=9, width=10, form="reference", noise="")
@example(levels=9, width=10, form="default", noise="")
def test_configurations_end_soon(folder: Path, levels: int, width: int, form: str, noise: str) -> None:
    conf = folder / "conf"
    (conf / "g").mkdir(parents=True)
    body = "" if form in ("reference", "default") else grow(levels, width, form)
    if form == "reference":
        refer = {f"a{n}": "".join([f"${{model.a{n - 1}}}"] * width) for n in range(1, levels + 1)}
        body = json.dumps({"a0": "x", **refer}) + "\n"
    elif form == "default":
        for level in range(levels):
            entries = [f"c{level + 1}@p{number}" for number in range(width)]
            (conf / f"g/c{level}.yaml").write_text(json.dumps({"defaults": entries}))
        (conf / f"g/c{levels}.yaml").write_text("x: 1\n")
    comment = f"# {noise.splitlines()[0] if noise else ''}\n".encode("utf-8", "replace")
    (conf / "model").mkdir()
    (conf / "model/x.yaml").write_bytes(body.encode() + (b"" if b"\0" in comment else comment))
    words = ["+g@model=c0"] if form == "default" else ["model=x"]
    try:
        result = run_inside(["plan", *words])
        assert result.code in (0, 2), result
        assert "Traceback" not in result.err and "internal error" not in result.err, result.err
    finally:
        shutil.rmtree(conf)
