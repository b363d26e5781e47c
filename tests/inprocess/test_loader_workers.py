"""DataLoader workers run on the CPUs that the plan has for them, and the rank's own process on its own."""

from pathlib import Path

import pytest

from tests.inprocess.loader_runs import ALL, OWN, read_notes, run_program

pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="one CPU has no room for workers of their own")

LOOK = """
def look(loader):
    "Where each worker is, all of its threads, and where this process."
    rows = [row for batch in loader for row in batch]
    workers = {row[0]: row[2] for row in rows}
    assert os.getpid() not in workers
    return [sorted(workers.values()), sorted(os.sched_getaffinity(0))]
"""
FORKED = """
import threading

def start_thread(_):
    "A thread of the worker's, from before it is moved."
    begun = threading.Event()
    threading.Thread(target=lambda: begun.set() or threading.Event().wait(), daemon=True).start()
    begun.wait()

def bind(worker):
    if worker:
        os.sched_setaffinity(0, ALL[1:])

def make(**options):
    return DataLoader(Places(8), **{"collate_fn": keep, "num_workers": 2, **options})

note(plain=look(make()), threads=look(make(worker_init_fn=start_thread)),
     bound=look(make(worker_init_fn=bind)))
kept = make(persistent_workers=True)
note(epochs=[look(kept) for _ in range(3)], two=[a[0][0] for a in map(look, [kept, make(num_workers=1)])])
kept = None

def in_child():
    child = os.fork()
    if child == 0:
        note(child=look(make(num_workers=1)))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

in_child()
os.sched_setaffinity(0, ALL[1:])
note(moved=look(make(num_workers=1)))
"""


def test_forked_workers_are_on_their_cpus(tmp_path: Path) -> None:
    notes = read_notes(run_program(tmp_path, LOOK + FORKED, default=False))
    theirs = [[ALL, ALL], OWN]
    assert notes["plain"] == notes["threads"] == theirs
    assert notes["epochs"] == [theirs] * 3
    assert notes["two"] == [ALL, ALL]
    # A program that binds its workers, or this process, means it; so does one that forks before it loads.
    assert notes["bound"] == [[ALL, ALL[1:]], OWN]
    assert notes["child"] == [[OWN], OWN]
    assert notes["moved"] == [[ALL[1:]], ALL[1:]]


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_workers_that_are_started_anew_are_on_their_cpus(tmp_path: Path, method: str) -> None:
    lines = f"""
if __name__ == "__main__":
    options = {{"collate_fn": keep, "num_workers": 2, "multiprocessing_context": {method!r}}}
    note(found=look(DataLoader(Places(8), **options)))
"""
    notes = read_notes(run_program(tmp_path, LOOK + lines, default=False))
    assert notes["found"] == [[ALL, ALL], OWN]


REASON = """
def count_warnings(workers):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(Places(), collate_fn=keep, num_workers=workers)
        rows = len(list(loader))
    assert rows == 4
    return [[os.path.basename(entry.filename), str(entry.message)[:32]] for entry in caught]

note(fits=count_warnings(2), over=count_warnings(3))
note(method=DataLoader.check_worker_number_rationality.__name__)
os.sched_setaffinity(0, ALL[1:])
note(moved=count_warnings(2))
"""


@pytest.mark.parametrize(
    "worker_cpus",
    [pytest.param(ALL, id="the plan's"), pytest.param(OWN, id="those without us", marks=pytest.mark.slow)],
)
def test_torch_counts_the_cpus_that_workers_get_or_would_have(tmp_path: Path, worker_cpus: list[int]) -> None:
    cpus = ",".join(map(str, worker_cpus))
    notes = read_notes(run_program(tmp_path, REASON, default=False, worker_cpus=cpus))
    warning = ["dataloader.py", "This DataLoader will create 3 wo"]
    assert notes["fits"] == []
    assert notes["over"] == [warning, warning]  # when it is made, and when it starts them
    assert notes["method"] == "check_worker_number_rationality"
    assert notes["moved"] == [[warning[0], "This DataLoader will create 2 wo"]] * 2


@pytest.mark.parametrize(
    "cpus",
    ["x", *(pytest.param(cpus, marks=pytest.mark.slow) for cpus in ("4000", "0-", "3-1", str(OWN[0])))],
)
def test_cpus_that_cannot_be_had_break_nothing(tmp_path: Path, cpus: str) -> None:
    lines = LOOK + "note(found=look(DataLoader(Places(), collate_fn=keep, num_workers=1)))"
    notes = read_notes(run_program(tmp_path, lines, default=False, worker_cpus=cpus))
    assert notes["found"] == [[OWN], OWN]
