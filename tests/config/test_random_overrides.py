"""No command line and no configuration file makes a traceback: always a code of ours and at most one line."""

import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.config.words import quote_value
from tests.data_files import DATA
from tests.seam import Result, clean_environ, run_inside

FEW = settings(max_examples=max(10, settings().max_examples // 3))
"""For what composes a configuration in each example, which takes 0.2 s."""
WORDS: dict[str, list[str]] = tomllib.loads((DATA / "random_words.toml").read_text())
VALID, FLAGS = WORDS["valid"], WORDS["flags"]
GRAMMAR = [*WORDS["grammar"], "\x00", "\udcff"]
fragments = st.lists(st.sampled_from(GRAMMAR) | st.text(max_size=4), min_size=1, max_size=6).map("".join)
keys = st.sampled_from([word.partition("=")[0] for word in VALID])
words = (
    st.sampled_from(VALID)
    | st.sampled_from(FLAGS)
    | fragments
    | st.tuples(keys, fragments).map("=".join)
    | st.tuples(st.sampled_from(VALID), fragments).map("".join)
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


def assert_clean(result: Result, folder: Path, *, kept: set[str]) -> None:
    assert result.code in (0, 2, 3), result
    assert "Traceback" not in result.err + result.out
    if result.code and "launch: job 1 of" not in result.err:
        errors = [
            line
            for line in result.err.splitlines()
            if not line.startswith(("launch: job ", "launch: warning: ", "launch: configuration "))
        ]
        assert len(errors) == 1 and errors[0].startswith("launch: error: "), result.err
    assert {path.name for path in folder.iterdir()} == kept


@FEW
@given(line=st.lists(words, max_size=5), plan=st.booleans())
def test_command_lines(folder: Path, line: list[str], *, plan: bool) -> None:
    verb = ["plan"] if plan else []
    result = run_inside([*verb, *(word for word in line if word != "--"), "dry_run=true"])
    assert_clean(result, folder, kept=set())


@given(text=st.text(max_size=200))
@example("=")
@example("'a' and 'b'")
@example("\\")
@example("\\'")
@example("a\\\\")
@example("'\\")
@example("\n\t ")
def test_quoted_values_come_through_byte_for_byte(text: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    quoted = quote_value(text)
    if quoted == text:
        assert text[0] == text[-1] in "'\""
        return
    assert OverridesParser.create().parse_override(f"++env.A={quoted}").value() == text


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(GRAMMAR)
)
names = st.sampled_from(WORDS["names"]) | st.text(max_size=4)
trees = st.recursive(
    scalars | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
lists = st.lists(
    names | st.dictionaries(names, names | st.none() | st.lists(names), min_size=1, max_size=2), max_size=4
)
primaries = st.fixed_dictionaries(
    {"defaults": lists | trees}, optional={"env": trees, "model": trees, "nodes": trees}
)
texts = st.text(max_size=60) | (trees | primaries).map(lambda tree: yaml.safe_dump(tree, allow_unicode=True))
contents = texts.map(lambda text: text.encode("utf-8", "surrogateescape")) | st.binary(max_size=30)


@FEW
@given(
    files=st.dictionaries(st.sampled_from(WORDS["places"]), contents, min_size=1, max_size=3),
    line=st.sampled_from(WORDS["lines"]).map(str.split),
)
def test_configuration_files(folder: Path, files: dict[str, bytes], line: list[str]) -> None:
    conf = folder / "conf"
    for name, content in files.items():
        path = conf / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    try:
        assert_clean(run_inside([*line, "dry_run=true"]), folder, kept={"conf"})
    finally:
        shutil.rmtree(conf)
