"""Reading ahead: the record of a start, what is cached, and the process that reads, with real files."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.agent.linked_parts import find_linked_parts
from launcher.agent.page_cache import are_cached, is_page_cached, read_into_cache
from launcher.agent.read_ahead import ReadAhead, find_record_folder, list_records, start_read_ahead
from launcher.agent.read_order import (
    ANY_SIZE,
    CHUNK,
    OrderEntry,
    Read,
    cut_arguments,
    find_torch_folder,
    limit_reads,
    list_looks,
    list_reads,
    name_record,
    parse_order,
    pick_samples,
)
from tests.probe.in_namespace import run_in_namespace
from tests.seam import clean_environ
from tests.strangers import give_away, open_folder

INPROCESS = Path(__file__).parents[2] / "launcher" / "inprocess"


@pytest.fixture
def dropped(tmp_path: Path) -> list[Path]:
    """Two files of 3 MiB of which nothing is in the page cache."""
    files = [tmp_path / "a.so", tmp_path / "b.pyc"]
    for path in files:
        path.write_bytes(os.urandom(1 << 16) * 48)
    for path in files * 3:  # a page that another CPU has just touched stays, so once more
        drop(path)
    if is_cached(files[0]):  # one page alone, since asking may read ahead
        pytest.skip("the kernel keeps what is written to this filesystem")
    return files


def drop(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(path: Path, offset: int = 0) -> bool | None:
    with path.open("rb") as file:
        return is_page_cached(file.fileno(), offset)


def write_record(path: Path, reads: list[object]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": 1, "reads": reads}))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"schema": 2, "reads": []},
        {"schema": 1, "reads": {}},
        {"schema": 1, "reads": [["relative", 1, None]]},
        {"schema": 1, "reads": [["/a\0b", 1, None]]},
        {"schema": 1, "reads": [["/a", -1, None]]},
        {"schema": 1, "reads": [["/a", True, None]]},
        {"schema": 1, "reads": [["/a", 1 << 50, None]]},
        {"schema": 1, "reads": [["/a", 1]]},
        {"schema": 1, "reads": [["/a", 1, [[0]]]]},
        {"schema": 1, "reads": [["/a", 1, [[0, 1.5]]]]},
        {"schema": 1, "reads": [["/a", 1, None]] * 100_001},
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_record_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_order(value)


def test_a_record_gives_reads_of_a_bounded_size() -> None:
    entries = parse_order({"schema": 1, "reads": [["/a", 5, None], ["/b", 9 << 20, [[4096, CHUNK + 7]]]]})
    reads = [Read("/a", 5, 0, 5), Read("/b", 9 << 20, 4096, CHUNK), Read("/b", 9 << 20, 4096 + CHUNK, 7)]
    assert list_reads(entries) == reads
    assert limit_reads(reads, CHUNK + 5) == reads[:2] and not limit_reads(reads, 4)
    samples = pick_samples(
        {"schema": 1, "reads": [["/a", 5, None]] * 5000 + [["/b", 9 << 20, [[0, 9], [50, 9]]]]}
    )
    assert len(samples) < 40 and Read("/b", 9 << 20, 50, 1) in samples


def test_a_record_is_for_a_program_in_an_interpreter() -> None:
    name, beginning = name_record("/v/bin/python", "", ("train.py", "--lr", "1"), "/w")
    assert name.startswith(beginning)
    assert name == name_record("/v/bin/python", "", ("train.py", "--lr", "2"), "/w")[0]
    for other in (("x.py",), ("-m", "train.py")):
        assert name_record("/v/bin/python", "", other, "/w")[0] != name
    assert name_record("/w/bin/python", "", ("train.py",), "/w")[1] != beginning
    assert cut_arguments(("python", "-u", "-m", "pkg", "a")) == ("python", "-u", "-m", "pkg")
    assert cut_arguments(("true", "a")) == ("true",)


def test_what_an_import_asks_for() -> None:
    assert list_looks("/p/a/__pycache__/b.cpython-311.pyc", (".so",)) == ["/p/a/b.py"]
    looks = ["/p/a/__init__.x.so", "/p/a/__init__.so", "/p/a/__init__.py"]
    assert list_looks("/p/a/__pycache__/__init__.cpython-311.pyc", (".x.so", ".so")) == looks
    assert list_looks("/p/lib.so", (".so",)) == []
    entries = [
        OrderEntry(f"/p/{name}/__pycache__/__init__.cpython-311.pyc", 1, None) for name in ("os", "torch")
    ]
    assert find_torch_folder(entries) == "/p" and find_torch_folder(entries[:1]) == ""


def test_the_parts_of_a_library(tmp_path: Path) -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = Path(next(line.split()[-1] for line in maps if "libc.so" in line or "libc-" in line))
    with library.open("rb") as file:
        parts = find_linked_parts(file.fileno())
    size = library.stat().st_size
    assert len(parts) == 2 and parts[0][0] == 0 and sum(length for _, length in parts) < size / 2
    assert all(begin >= 0 and begin + length <= size for begin, length in parts)
    for content in (b"", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + b"\xff" * 200, os.urandom(500)):
        (tmp_path / "x").write_bytes(content)
        with (tmp_path / "x").open("rb") as file:
            assert find_linked_parts(file.fileno()) == []


def test_what_is_cached_is_known(dropped: list[Path]) -> None:
    path = dropped[0]
    size = path.stat().st_size
    read = Read(str(path), size, 1 << 20, 4096)
    assert are_cached([read]) is False
    assert read_into_cache(read, bytearray(CHUNK)) == 4096
    assert are_cached([read]) is True
    # Another file by now, or none: nothing is known of it.
    assert are_cached([Read(str(path), size + 1, 0, 1), Read("/no/such", 1, 0, 1)]) is None
    assert are_cached([Read(str(path), ANY_SIZE, 1 << 20, 1)]) is True


def start(tmp_path: Path, mode: str, cache: Path) -> ReadAhead:
    environ = {**clean_environ(), "LAUNCH_CACHE": str(cache)}
    return start_read_ahead(mode, sys.executable, ("train.py",), environ, str(tmp_path))


def finish(reader: ReadAhead, folder: Path) -> dict[str, object]:
    """Wait for the process's own end, and return what it told."""
    assert reader.process
    reader.process.wait(30)
    reader.use_directory(folder, "n0")
    reader.close()
    account: dict[str, object] = json.loads((folder / "read-ahead-n0.json").read_text())
    return account


def test_files_are_read_if_they_are_not_cached(dropped: list[Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    size = dropped[0].stat().st_size
    name, _ = name_record(sys.executable, "", ("train.py",), str(tmp_path))
    record = cache / "read-order" / name
    part = [str(dropped[0]), size, [[1 << 20, 1 << 16]]]
    write_record(record, [part, [str(dropped[1]), size, None], ["/no/such", 9, None]])
    reader = start(tmp_path, "auto", cache)
    assert not reader.variables
    account = finish(reader, tmp_path)
    assert account["source"] == "recorded" and account["stale"] == 1
    assert account["read"] == size + (1 << 16)
    assert is_cached(dropped[0], 1 << 20) and is_cached(dropped[1]) and is_cached(dropped[1], size - 4096)
    assert start(tmp_path, "auto", cache).process is None
    assert start(tmp_path, "off", cache).process is None
    assert finish(start(tmp_path, "on", cache), tmp_path)["read"] == size + (1 << 16)


def test_a_bad_record_is_no_reason_not_to_start(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    name, _ = name_record(sys.executable, "", ("train.py",), str(tmp_path))
    record = cache / "read-order" / name
    record.parent.mkdir(parents=True)
    for content in ("", "[" * 100_000, '{"schema": 1, "reads": [["/etc/shadow"]]}'):
        record.write_text(content)
        account = finish(start(tmp_path, "on", cache), tmp_path)
        assert account["source"] == "rule"
    (tmp_path / "file").write_text("")
    assert start(tmp_path, "on", tmp_path / "file") == ReadAhead()


def test_a_first_start_asks_for_a_record_and_old_ones_go(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    reader = start(tmp_path, "auto", cache)
    (path,) = reader.variables.values()
    reader.close()
    folder = Path(path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    for number in range(70):
        (folder / f"{number}.json").touch()
        os.utime(folder / f"{number}.json", (number, number))
    kept = list_records(str(folder))
    assert sorted(kept, key=kept.__getitem__)[0] == "6.json" and len(kept) == 64
    write_record(Path(path), [])
    reader = start(tmp_path, "auto", cache)
    reader.close()
    assert not reader.variables
    long_ago = time.time() - 30 * 86400
    os.utime(path, (long_ago, long_ago))
    reader = start(tmp_path, "auto", cache)
    reader.close()
    assert list(reader.variables) == ["LAUNCH_READ_ORDER"]


def test_no_record_is_kept_in_another_users_home() -> None:
    with open_folder() as folder:
        home = give_away(folder)
        for environ in ({"HOME": str(home)}, {"XDG_CACHE_HOME": str(home)}, {"HOME": f"{home}/none"}):
            with pytest.raises(OSError, match=r"belongs to|No such file"):
                find_record_folder(environ)
            assert not list(home.iterdir())


@pytest.mark.slow
def test_a_rank_records_what_it_has_read(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    environ = {**clean_environ(), "PYTHONPATH": str(INPROCESS), "LAUNCH_READ_ORDER": str(record)}
    script = "import os, torch; assert 'LAUNCH_READ_ORDER' not in os.environ"
    subprocess.run([sys.executable, "-c", script], env={**environ, "RANK": "0"}, check=True, timeout=120)
    assert record.stat().st_mode & 0o777 == 0o600
    entries = parse_order(json.loads(record.read_text()))
    names = [entry.path.rpartition("/")[2] for entry in entries]
    package = next(n for n, entry in enumerate(entries) if "/torch/__pycache__/__init__." in entry.path)
    library = names.index("libtorch_cpu.so")
    assert package < library < next(n for n, entry in enumerate(entries) if "/torch/nn/" in entry.path)
    parts = entries[library].extents
    assert parts and sum(length for _, length in parts) < entries[library].size / 2
    assert list_reads(entries) and find_torch_folder(entries)
    assert not list(tmp_path.glob("record.json.*"))


def test_other_ranks_record_nothing(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    environ = {**clean_environ(), "PYTHONPATH": str(INPROCESS), "LAUNCH_READ_ORDER": str(record)}
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from torch import version")
    (tmp_path / "torch" / "version.py").write_text("")
    script = "import sys; sys.path.insert(0, ''); import torch.version"
    for rank, is_written in (("1", False), ("0", True)):
        environ["RANK"] = rank
        subprocess.run([sys.executable, "-c", script], env=environ, cwd=tmp_path, check=True, timeout=60)
        assert record.exists() == is_written


def test_the_process_ends_with_the_launcher_though_a_disk_does_not_answer(tmp_path: Path) -> None:
    found = run_in_namespace(
        """
from launcher.agent.read_ahead import start_process
folder.mkdir(exist_ok=True)
device = mount_stuck(folder / "stuck", reads=False)
record = folder / "record.json"
record.write_text(json.dumps({"schema": 1, "reads": [[str(folder / "stuck" / "x"), 9, None]] * 3}))
request = {"record": str(record), "folders": [], "always": True}
script = (
    "import os, sys, json; from launcher.agent.read_ahead import start_process;"
    "print(start_process(json.loads(sys.argv[1])).pid, flush=True); os._exit(0)"
)
told = subprocess.run([sys.executable, "-c", script, json.dumps(request)], stdout=subprocess.PIPE).stdout
orphan = int(told)
import time
def is_gone(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
end = time.monotonic() + 20
while not is_gone(orphan) and time.monotonic() < end:
    time.sleep(0.05)
print(json.dumps({"gone": is_gone(orphan)}))
sys.stdout.flush()
import os
os._exit(0)
""",
        tmp_path,
    )
    assert found == {"gone": True}
