"""Files that users name or start beside: whatever they hold, an answer comes soon, and it is clean."""

import contextlib
import json
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from launcher.config.program import read_variables
from launcher.config.start import load_snapshot
from launcher.errors import UsageError
from launcher.rank.entry import PlacementError, PlanEntry, read_plan_file
from tests.fuzzing import scalars, texts

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


@given(content=data)
@example(content=b"[" * 100_000)
@example(content=b"9" * 100_000)
@example(content=b"A='" * 100_000)
def test_what_users_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    for read in (read_variables, load_snapshot):
        with contextlib.suppress(UsageError):
            read(str(path))
    with contextlib.suppress(PlacementError, KeyError, TypeError, ValueError, AttributeError):
        PlanEntry(read_plan_file(str(path)))
