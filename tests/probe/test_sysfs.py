"""Single files."""

import os
from pathlib import Path

import pytest

from launcher.probe.sysfs import PAGE, SIZE_LIMIT, Tree, parse_number

from .machine_trees import put


def test_list_longer_than_a_page_is_read_whole(tmp_path: Path) -> None:
    numbers = range(0, 8192, 2)
    put(tmp_path, "list", ",".join(map(str, numbers)))
    assert (tmp_path / "list").stat().st_size > 4 * PAGE
    assert Tree(tmp_path).read_list("list") == frozenset(numbers)


def test_file_that_comes_in_short_reads_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Procfs ends a read of the mount table at a line's end (seq_file)."""
    read = os.read
    put(tmp_path, "mounts", "line\n" * 3000)
    monkeypatch.setattr(os, "read", lambda handle, size: read(handle, min(size, 4000)))
    assert Tree(tmp_path).read("mounts", lines=True) == ("line\n" * 3000).strip()


def test_name_with_a_nul_is_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert tree.read("a\0b") is None
    assert tree.list_directory("a\0b") == []
    assert tree.resolve_links("a\0b") is None
    assert not tree.has("a\0b")


@pytest.mark.parametrize(
    ("target", "found"), [("file", "file"), ("nothing", "nothing"), ("..", None), ("/", None)]
)
def test_links_are_followed_within_the_root(target: str, found: str | None, tmp_path: Path) -> None:
    put(tmp_path, "file", "")
    (tmp_path / "link").symlink_to(target)
    assert Tree(tmp_path).resolve_links("link") == found


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("18446744073709551615", 2**64 - 1), ("-1", None), ("", None), (None, None), ("1e3", None),
     ("\u0663", None), ("9" * 21, None), ("1_0", None)],
)  # fmt: skip
def test_number(text: str | None, number: int | None) -> None:
    assert parse_number(text) == number


def test_endless_file_ends(tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert len(Tree(tmp_path).read("zero") or "") == SIZE_LIMIT


@pytest.mark.parametrize("name", ["nothing", "folder", "dangling"])
def test_what_is_no_file_has_no_text(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    tree = Tree(tmp_path)
    assert tree.read(name) is None
    assert tree.read_number(name) is None
    assert tree.read_list(name) is None
    assert tree.read_fields(name) == {}


@pytest.mark.parametrize(
    ("text", "kib"),
    [
        ("MemTotal:       24684084 kB\nMemFree: 1 kB", 24684084),
        ("Node 0 MemTotal:       5204172 kB", 5204172),
        ("MemTotal:", None),
        ("MemTotal: much", None),
        ("MemFree: 1 kB", None),
    ],
)
def test_mem_total(text: str, kib: int | None, tmp_path: Path) -> None:
    put(tmp_path, "meminfo", text)
    assert Tree(tmp_path).read_meminfo("meminfo").get("MemTotal") == kib


def test_fields_keep_colons_of_their_values(tmp_path: Path) -> None:
    put(tmp_path, "information", "Bus Location: \t 0000:07:00.0\nnothing\nModel: \t\t A: B")
    assert Tree(tmp_path).read_fields("information") == {"Bus Location": "0000:07:00.0", "Model": "A: B"}


def test_notes_of_one_text_become_one_warning(tmp_path: Path) -> None:
    put(tmp_path, "odd", "x\x1b{items}" + "y" * 60)
    tree = Tree(tmp_path)
    tree.add_warning("{items} is {value}", 3, path="odd")
    tree.add_warning("{items} is {value}", 1, 2, "name", path="other")
    tree.add_warning("nothing else", value=None)
    first, second = tree.list_warnings()
    assert first == f"1-3, name is 'x\\x1b{{items}}{'y' * 31}…'"
    assert second == "nothing else"
