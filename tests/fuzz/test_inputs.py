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
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.config.environment_files import read_variables
from launcher.config.request import load_snapshot
from launcher.errors import UsageError
from launcher.files import read_input
from launcher.rank.entry import PlacementError, PlanEntry, read_plan_file
from tests.fuzzing import scalars, texts
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


@settings(max_examples=max(8, settings().max_examples // 10))
@given(content=data)
def test_configurations(folder: Path, content: bytes) -> None:
    (folder / "conf/model").mkdir(parents=True)
    (folder / "conf/model/x.yaml").write_bytes(content)
    try:
        result = run_inside(["plan", "model=x"])
        assert result.code in (0, 2), result
        assert "Traceback" not in result.err and "internal error" not in result.err, result.err
    finally:
        shutil.rmtree(folder / "conf")
