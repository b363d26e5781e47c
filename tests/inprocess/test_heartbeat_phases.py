"""Phases of a rank that uses torch, and that nothing of torch is other than it was."""

import signal
from pathlib import Path

from launcher.watch.flight_recorder import post_handler
from tests.inprocess.hooked import run_code
from tests.inprocess.watched import start_program

PHASES = """
import inspect, json, pickle, warnings
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import safetensors.torch
from torch._dynamo.utils import counters
from launcher.watch.heartbeat import read_heartbeat

seen = {}

def note(name):
    found = read_heartbeat("beats/rank-0.beat")
    seen[name] = [found.phase, found.step, found.batches, found.notes]

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if index == 2:
            note(self.name)
        return torch.ones(4) * index

note("imported")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
frozen = torch.nn.Linear(4, 4).eval()
note("a frozen model")
data = Data()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def draw(name):
    data.name = name
    yield from torch.utils.data.DataLoader(data)

def train(name):
    for batch in draw(name):
        model(batch).sum().backward()
        optimizer.step()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
note("joined")
train("the first wait")
note("trained")
torch.save(model.state_dict(), "model.pt")
note("saved")
train("the wait after it")
model.eval()
note("set to evaluate")
for batch in draw("a wait within"):
    model(batch)
note("evaluated")
model.train()
note("set to train")
model.train(False)
note("again")
optimizer.step()
note("stepped")

def back(graph, _):
    note("compiling")
    return graph.forward

for _ in range(2):
    torch.compile(lambda x: x + 1, backend=back)(torch.ones(3))
    note("compiled")
    torch._dynamo.reset()
    seen["once more"] = seen.pop("compiling")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    dcp.save({"a": torch.ones(3)}, checkpoint_id="dcp", no_dist=True)
    note("saved by parts")
    future = dcp.async_save({"a": torch.ones(3)}, checkpoint_id="dcp2")
    note("saving by a thread")
    optimizer.step()
    future.result()
note("saved by a thread")
safetensors.torch.save_file({"a": torch.ones(3)}, "model.safetensors")
note("safetensors")

@torch.compile(fullgraph=True, backend="eager")
def whole(x):
    model.eval()
    y = model(x)
    model.train()
    return y + model(x)

counters.clear()
whole(torch.ones(2, 4))
seen["graphs"] = [counters["stats"]["unique_graphs"], len(counters["graph_break"])]

def count_graphs():
    "Graphs of a function that sets its model to evaluate, while others are set to train and to evaluate."
    torch._dynamo.reset()
    counters.clear()
    model.eval()
    rest = torch.compile(lambda x: model.eval()(x), backend="eager")
    for mode in (True, False, True):
        torch.nn.Identity().train(mode)
        rest(torch.ones(2, 4))
    return counters["stats"]["unique_graphs"]

wrapped = torch.nn.Module.train
seen["graphs with and without us"] = [count_graphs()]
torch.nn.Module.train = inspect.unwrap(wrapped)
seen["graphs with and without us"].append(count_graphs())
torch.nn.Module.train = wrapped
for function in (torch.save, dist.init_process_group, dcp.save, torch.nn.Module.train):
    assert pickle.loads(pickle.dumps(function)) is function, function
    assert inspect.unwrap(function) is not function
    assert str(inspect.signature(function)) == str(inspect.signature(inspect.unwrap(function)))
assert list(inspect.signature(torch.nn.Module.train).parameters) == ["self", "mode"]
assert sys.modules["torch.distributed.distributed_c10d"].init_process_group is dist.init_process_group

child = os.fork()
if not child:
    optimizer.step()
    torch.save(1, "child.pt")
    os._exit(0)  # it would hang after a process group of gloo, with and without us
assert os.waitpid(child, 0)[1] == 0
note("a child saved")
print(json.dumps(seen))
"""
EXPECTED = {
    "imported": ["starting", 0, 0],
    "a frozen model": ["starting", 0, 0],
    "joined": ["starting", 0, 0],
    "the first wait": ["loading", 2, 2],
    "trained": ["training", 4, 4],
    "saved": ["saving", 4, 4],
    "the wait after it": ["loading", 6, 6],
    "set to evaluate": ["evaluating", 8, 8],
    "a wait within": ["loading", 8, 10],
    "evaluated": ["evaluating", 8, 12],
    "set to train": ["training", 8, 12],
    "again": ["evaluating", 8, 12],
    "stepped": ["training", 9, 12],
    "once more": ["compiling", 9, 12],
    "compiled": ["training", 9, 12],
    "saved by parts": ["saving", 9, 12],
    "saving by a thread": ["saving", 9, 12],
    "saved by a thread": ["training", 10, 12],
    "safetensors": ["saving", 10, 12],
    "a child saved": ["saving", 10, 12],
}


def test_phases_of_a_program_with_torch(tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    beats.mkdir()
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LAUNCH_WATCH": str(beats)}
    code = f"import os, sys\n{PHASES}"
    seen = run_code(code, tmp_path, "default", **variables)
    assert isinstance(seen, dict)
    assert seen.pop("graphs") == [1, 0]
    assert seen.pop("graphs with and without us") == [1, 1]
    assert seen == {name: [*values, []] for name, values in EXPECTED.items()}


LATE = """
import torch, torch.distributed as dist
wait()
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=2)
"""


def test_a_rank_that_waits_for_the_others_answers(tmp_path: Path) -> None:
    """It ends of a signal as it would, and torch's server is not heard of."""
    with start_program(LATE, tmp_path, WORLD_SIZE="2") as program:
        program.wait()
        assert program.read_now().phase == "starting"
        server = program.path.with_suffix(".sock")
        assert not server.exists()
        program.go_on()
        while program.read_now().phase != "joining":
            assert program.process.poll() is None
        assert program.read_now().notes == ()
        assert post_handler(server, "ping", 60) == b"pong"
        program.process.send_signal(signal.SIGTERM)
        assert program.finish() == (-signal.SIGTERM, "", "")
