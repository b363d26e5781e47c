"""DataLoaders in a rank: those that say nothing of workers get the plan's number, and workers their CPUs."""

from pathlib import Path

import pytest

from launcher.cpulist import parse_cpulist
from tests.inprocess.loader_runs import ALL, OWN, read_notes, run_program

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
MADE = f"""
note(counts={{call: eval(call).num_workers for call in {[*CALLS]}}})
note(refused={{call: catch(lambda: eval(call).num_workers) for call in {[*REFUSED]}}})
loader = DataLoader(data)
note(as_is=[loader.pin_memory, loader.persistent_workers, loader.timeout, loader.generator,
            loader.multiprocessing_context, loader.prefetch_factor])
import launcher
note(plan=launcher.rank_plan(),
     asked=[launcher.num_workers(9), launcher.collect(), launcher.collect(now=True)])
"""
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


def test_loaders_have_the_workers_that_are_right_for_them(tmp_path: Path) -> None:
    """Frameworks pass on what differs from the signature's defaults (Lightning), or all (Accelerate)."""
    notes = read_notes(run_program(tmp_path, COUNT + MADE + REMADE + ITEMS, LAUNCH_GC="synchronized"))
    assert notes["counts"] == CALLS
    refused = notes["refused"]
    assert isinstance(refused, dict)
    assert {call: str(said)[: len(REFUSED[call])] for call, said in refused.items()} == REFUSED
    assert notes["as_is"] == [False, False, 0, None, None, 2]
    assert notes["remade"] == notes["pickled"] == [2, 0, 1, 0]
    assert notes["named"] == ["__init__", "DataLoader.__init__", "torch.utils.data.dataloader"]
    assert notes["spec"] == notes["doc"] == 2
    assert notes["items"] == {"order": list(range(7)), "workers": 2, "lines": list(range(5)), "same": True}
    plan = notes["plan"]  # which the program can ask for, too
    assert isinstance(plan, dict)
    keys = ["cpus", "gpu", "local_rank", "memory", "nic", "num_workers", "omp_num_threads", "worker_cpus"]
    assert sorted(plan) == keys
    assert [sorted(parse_cpulist(plan[name])) for name in ("cpus", "worker_cpus")] == [OWN, ALL]
    assert (plan["local_rank"], plan["num_workers"], plan["memory"]["policy"]) == (0, 2, "preferred")
    assert notes["asked"] == [2, False, True]


PLACED = """
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

def main():
    note(count=DataLoader(Places()).num_workers, file=inspect.getsourcefile(DataLoader.__init__),
         default=inspect.signature(DataLoader).parameters["num_workers"].default)
    note(fits=count_warnings(2), over=count_warnings(3))
    note(method=DataLoader.check_worker_number_rationality.__name__)
    note(plain=look(make()), threads=look(make(worker_init_fn=start_thread)),
         bound=look(make(worker_init_fn=bind)))
    note(started=look(make(multiprocessing_context="forkserver")))
    kept = make(persistent_workers=True)
    note(epochs=[look(kept) for _ in range(3)], two=[a[0][0] for a in map(look, [kept, make(num_workers=1)])])
    kept = None
    child = os.fork()
    if child == 0:
        note(child=look(make(num_workers=1)))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.sched_setaffinity(0, ALL[1:])
    note(moved=look(make(num_workers=1)), counted=count_warnings(2))

if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(len(ALL) < 2, reason="one CPU has no room for workers of their own")
def test_workers_are_on_their_cpus_and_unless_asked_for_loaders_are_torchs_own(tmp_path: Path) -> None:
    notes = read_notes(run_program(tmp_path, PLACED, default=False))
    assert (notes["count"], notes["default"]) == (0, 0)
    assert str(notes["file"]).endswith("torch/utils/data/dataloader.py")
    warning = ["dataloader.py", "This DataLoader will create 3 wo"]
    assert notes["fits"] == []
    assert notes["over"] == [warning, warning]  # when it is made, and when it starts them
    assert notes["method"] == "check_worker_number_rationality"
    theirs = [[ALL, ALL], OWN]
    assert notes["plain"] == notes["threads"] == notes["started"] == theirs
    assert notes["epochs"] == [theirs] * 3
    assert notes["two"] == [ALL, ALL]
    # A program that binds its workers, or this process, means it; so does one that forks before it loads.
    assert notes["bound"] == [[ALL, ALL[1:]], OWN]
    assert notes["child"] == [[OWN], OWN]
    assert notes["moved"] == [[ALL[1:]], ALL[1:]]
    assert notes["counted"] == [[warning[0], "This DataLoader will create 2 wo"]] * 2


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


FRAMEWORKS = """
import logging
logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")
del os.environ["LOCAL_RANK"]  # one process alone: no rendezvous
from accelerate import Accelerator
from lightning.pytorch import LightningModule, Trainer

class Small(LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.options = options
    def train_dataloader(self):
        return DataLoader(data, shuffle=True, **self.options)
    def training_step(self, batch, index):
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(loader, **options):
    "Train on a few batches, for which Lightning makes a loader that does not shuffle."
    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar")}
    trainer = Trainer(max_epochs=1, overfit_batches=2, accelerator="cpu", devices=1,
                      enable_model_summary=False, **quiet)
    trainer.fit(Small(**options), loader)
    made = trainer.train_dataloader
    assert made is not loader and type(made.sampler).__name__ == "SequentialSampler"
    return made.num_workers

def prepare(**options):
    "Read all of a loader that Accelerate has made of another."
    made = Accelerator(cpu=True).prepare(DataLoader(data, **options))
    assert len(list(made)) == 8
    return made.num_workers

data = TensorDataset(torch.zeros(8, 1))
said = [{}, {"num_workers": 0}, {"num_workers": 1}]
note(hook=[fit(None, **options) for options in said],
     given=[fit(DataLoader(data, shuffle=True, **options)) for options in said],
     accelerate=[prepare(**options) for options in said])
"""


@pytest.mark.slow
def test_loaders_that_are_made_anew_keep_their_workers(tmp_path: Path) -> None:
    notes = read_notes(run_program(tmp_path, FRAMEWORKS))
    assert notes == {"hook": [2, 0, 1], "given": [2, 0, 1], "accelerate": [2, 0, 1]}
