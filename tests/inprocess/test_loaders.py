"""A `DataLoader(...)` that says nothing of workers gets the plan's number, and no other loader does."""

import sys
from pathlib import Path

import pytest

from launcher.inprocess.launch_inprocess.loaders import start_loader_policies
from tests.inprocess.loader_runs import read_notes, run_program

CALLS = {
    "DataLoader(data)": 2,
    "DataLoader(data, 2, True)": 2,
    "DataLoader(dataset=data)": 2,
    "DataLoader(**{'dataset': data, 'batch_size': 2, 'shuffle': True})": 2,
    "DataLoader[int](data)": 2,
    "DataLoader([1, 2, 3])": 2,
    "DataLoader(TensorDataset(torch.zeros(3)))": 2,
    "DataLoader(data, persistent_workers=True)": 2,
    "DataLoader(data, prefetch_factor=3)": 2,
    "DataLoader(data, timeout=5, multiprocessing_context='fork')": 2,
    "Sub(data)": 2,
    "Sub(data, num_workers=0)": 0,
    "Fixed(data)": 0,
    "DataLoader(data, num_workers=0)": 0,
    "DataLoader(data, 1, None, None, None, 0)": 0,
    "DataLoader(data, num_workers=1)": 1,
    "DataLoader(data, 1, None, None, None, 1)": 1,
    "DataLoader(Lines())": 0,
    "DataLoader(dataset=Lines())": 0,
    "DataLoader(torch.utils.data.ChainDataset([Lines()]))": 0,
    "DataLoader(Posing())": 0,
    "DataLoader(TensorDataset(away))": 0,
    "DataLoader(Subset(TensorDataset(away), [0]))": 0,
    "DataLoader(TensorDataset(torch.zeros(3), away))": 0,
    "DataLoader(Held({'x': [away]}))": 0,
    "DataLoader(Held('cuda:1'))": 0,
    "DataLoader(Held(torch.device('cuda')))": 0,
    "DataLoader(Held('cpu'))": 2,
    "DataLoader(Shy())": 0,
}
"""Calls, and the workers that their loaders have where the plan says 2. `meta` stands for a GPU."""
COUNT = """
class Sub(DataLoader):
    def __init__(self, *args, **kwargs):
        self.more = 1
        super().__init__(*args, **kwargs)

class Fixed(DataLoader):
    def __init__(self, dataset, num_workers=0):
        super().__init__(dataset, num_workers=num_workers)

class Held(Places):
    def __init__(self, value):
        super().__init__()
        self.value = value

class Posing:
    "A proxy, as wrapt makes them."
    __class__ = IterableDataset

class Shy(Places):
    @property
    def __dict__(self):
        raise OSError("not now")

data, away = Places(), torch.zeros(3, device="meta")
"""
REFUSED = {
    "DataLoader(data, num_workers=-1)": "ValueError: num_workers option should be non-negative",
    "DataLoader(data, num_workers=0, persistent_workers=True)": "ValueError: persistent_workers option",
    "DataLoader(data, num_workers=0, prefetch_factor=2)": "ValueError: prefetch_factor option",
    "DataLoader(Lines(), persistent_workers=True)": "ValueError: persistent_workers option needs",
    "DataLoader(data, batch_size=-1)": "ValueError: batch_size should be a positive",
    "DataLoader(data, no_such=1)": "TypeError: ",
    "DataLoader()": "TypeError: ",
    "DataLoader(data, dataset=data)": "TypeError: ",
    "DataLoader(data, num_workers=None)": "TypeError: ",
}
"""Calls that torch refuses, with its own words."""


MADE = (
    COUNT
    + f"""
note(counts={{call: eval(call).num_workers for call in {[*CALLS]}}})
note(refused={{call: catch(lambda: eval(call).num_workers) for call in {[*REFUSED]}}})
loader = DataLoader(data)
note(as_is=[loader.pin_memory, loader.persistent_workers, loader.timeout, loader.generator,
            loader.multiprocessing_context, loader.prefetch_factor])
"""
)
REMADE = """
import pickle

def remake(loader):
    parameters = inspect.signature(type(loader).__init__).parameters
    changed = {name: value for name, value in vars(loader).items()
               if name in parameters and parameters[name].default is not value}
    for name in ("batch_sampler", "sampler", "collate_fn"):
        changed.pop(name, None)
    return type(loader)(**changed).num_workers

data = Places()
made = [DataLoader(data), *(DataLoader(data, num_workers=number) for number in (0, 1)), DataLoader(Lines())]
spec = inspect.getfullargspec(DataLoader.__init__)
note(remade=[remake(loader) for loader in made],
     pickled=[pickle.loads(pickle.dumps(loader)).num_workers for loader in made],
     named=[DataLoader.__init__.__name__, DataLoader.__init__.__qualname__, DataLoader.__init__.__module__],
     spec=spec.defaults[spec.args.index("num_workers") - 2],
     doc=inspect.signature(DataLoader).parameters["num_workers"].default)
"""
ITEMS = """
data = Places(7)
rows = [row for batch in DataLoader(data, batch_size=2, collate_fn=keep) for row in batch]
def shuffle(**options):
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.arange(9)), shuffle=True, collate_fn=keep, **options)
    return [int(batch[0][0]) for batch in loader]
note(items=dict(order=[row[1] for row in rows], workers=len({row[0] for row in rows} - {os.getpid()}),
     lines=[int(batch[0]) for batch in DataLoader(Lines(), collate_fn=keep)],
     same=shuffle() == shuffle(num_workers=0)))
"""


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What one program with the plan's default finds, for several tests."""
    return read_notes(run_program(tmp_path_factory.mktemp("loaders"), MADE + REMADE + ITEMS))


def test_calls_have_the_workers_that_are_right_for_them(notes: dict[str, object]) -> None:
    assert notes["counts"] == CALLS
    refused = notes["refused"]
    assert isinstance(refused, dict)
    assert {call: str(said)[: len(REFUSED[call])] for call, said in refused.items()} == REFUSED
    assert notes["as_is"] == [False, False, 0, None, None, 2]


def test_the_signature_is_true_so_that_loaders_can_be_made_anew(notes: dict[str, object]) -> None:
    """Frameworks pass on what differs from the signature's defaults (Lightning), or all (Accelerate)."""
    assert notes["remade"] == notes["pickled"] == [2, 0, 1, 0]
    assert notes["named"] == ["__init__", "DataLoader.__init__", "torch.utils.data.dataloader"]
    assert notes["spec"] == notes["doc"] == 2


def test_items_come_once_and_in_order(notes: dict[str, object]) -> None:
    expected = {"order": list(range(7)), "workers": 2, "lines": list(range(5)), "same": True}
    assert notes["items"] == expected


def test_unless_asked_for_loaders_are_torchs_own(tmp_path: Path) -> None:
    lines = """
note(count=DataLoader(Places()).num_workers, file=inspect.getsourcefile(DataLoader.__init__),
     default=inspect.signature(DataLoader).parameters["num_workers"].default)
"""
    notes = read_notes(run_program(tmp_path, lines, default=False))
    assert (notes["count"], notes["default"]) == (0, 0)
    assert str(notes["file"]).endswith("torch/utils/data/dataloader.py")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LAUNCH_NUM_WORKERS": "3"},
        {"LAUNCH_LOADER_DEFAULT": "1"},
        {"LAUNCH_NUM_WORKERS": "0", "LAUNCH_LOADER_DEFAULT": "1"},
        {"LAUNCH_NUM_WORKERS": "-3", "LAUNCH_LOADER_DEFAULT": "1"},
        {"LAUNCH_NUM_WORKERS": "many", "LAUNCH_LOADER_DEFAULT": "1"},
        {"LAUNCH_NUM_WORKERS": "3", "LAUNCH_LOADER_DEFAULT": "0"},
    ],
)
def test_nothing_waits_for_torch_where_nothing_is_asked_for(environ: dict[str, str]) -> None:
    finders = list(sys.meta_path)
    start_loader_policies(environ)
    assert sys.meta_path == finders


CHILDREN = """
def count(queue):
    queue.put([DataLoader(Places()).num_workers, outer.num_workers, len(list(outer))])

def in_child(context, daemon):
    queue = context.SimpleQueue()
    child = context.Process(target=count, args=(queue,), daemon=daemon)
    child.start()
    found = queue.get()
    child.join()
    return found

class Nested(Dataset):
    "Reads another loader, in a worker that may have no children."
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return [outer.num_workers, DataLoader(Places()).num_workers, len(list(outer))]

outer = DataLoader(Places(), collate_fn=keep)
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    note(daemon=in_child(context, True), child=in_child(context, False),
         spawned=in_child(multiprocessing.get_context("spawn"), False)[0])
    note(worker=[batch[0] for batch in DataLoader(Nested(), collate_fn=keep)], outer=outer.num_workers,
         rows=len(list(outer)))
"""


@pytest.mark.slow
def test_children_and_workers_have_torchs_default(tmp_path: Path) -> None:
    notes = read_notes(run_program(tmp_path, CHILDREN))
    assert notes["daemon"] == notes["child"] == [0, 0, 4]
    assert notes["worker"] == [[0, 0, 4]] * 2
    assert (notes["spawned"], notes["outer"], notes["rows"]) == (0, 2, 4)


def test_a_program_that_chose_how_processes_start_is_left_alone(tmp_path: Path) -> None:
    """Other ways than fork run the main file anew in each worker, and pickle the dataset."""
    lines = """
def look():
    loader = DataLoader(Places(), collate_fn=lambda batch: batch)
    method = getattr(loader.multiprocessing_context, "_name", None)
    return [loader.num_workers, method, len(list(loader))]

found = {"unset": look()}
for method in ("fork", "spawn", "forkserver"):
    multiprocessing.set_start_method(method, force=True)
    found[method] = look()
# Python 3.14 starts processes by forkserver, and says so first.
context = multiprocessing.context
context._default_context._actual_context = None
context._default_context._default_context = context._concrete_contexts["forkserver"]
multiprocessing.get_all_start_methods = lambda: ["forkserver", "spawn", "fork"]
given = DataLoader(Places(), multiprocessing_context="spawn")
note(**found, later=look(), given=given.multiprocessing_context._name)
"""
    notes = read_notes(run_program(tmp_path, lines))
    assert notes == {
        "unset": [2, None, 4],
        "fork": [2, None, 4],
        "spawn": [0, None, 4],
        "forkserver": [0, None, 4],
        "later": [2, "fork", 4],
        "given": "spawn",
    }


def test_an_error_in_a_worker_is_torchs_own(tmp_path: Path) -> None:
    lines = """
class Broken(Places):
    def __getitem__(self, index):
        raise KeyError("no such item")
list(DataLoader(Broken()))
"""
    done = run_program(tmp_path, lines)
    assert done.returncode == 1
    assert "Caught KeyError in DataLoader worker process 0" in done.stderr
    assert "launch_inprocess" not in done.stderr
