"""What a rank's program starts has the collector as it would have had it, and counts no steps."""

from pathlib import Path

from tests.inprocess.hooked import run_code

PROGRAM = """
import copy, gc, json, multiprocessing, os, subprocess, sys
import torch
import torch.multiprocessing

def look():
    hooks = [module for module in sys.modules if module.startswith("launch_inprocess")]
    state = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
    return [*state, type(gc.collect).__name__, os.environ.get("PYTHONPATH"), bool(hooks)]

class Looks(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return json.dumps(look()[:5])

def train(optimizer, steps):
    for _ in range(steps):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

def tell_steps(pipe, optimizer):
    train(optimizer, 20)
    pipe.send([look()[:5], sorted(vars(optimizer))])

def spawned(_, path, optimizer):
    train(optimizer, 20)
    with open(path, "w") as file:
        json.dump(look(), file)

def fork_once():
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        os.write(sink, json.dumps(look()[:5]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(sink)
    with open(source) as file:
        return json.load(file)

def main():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    found = {}
    # In the middle of a step, and where the collector is ours.
    handle = optimizer.register_step_pre_hook(lambda *_: found.update(forked=fork_once()))
    train(optimizer, 8)
    handle.remove()
    for way in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Looks(), num_workers=1, multiprocessing_context=way)
        found[f"loader {way}"] = [batch for batch in loader]
        ends = multiprocessing.Pipe()
        start = multiprocessing.get_context(way).Process
        child = start(target=tell_steps, args=(ends[0], copy.deepcopy(optimizer)))
        child.start()
        found[way] = ends[1].recv()
        child.join()
    torch.multiprocessing.spawn(spawned, (f"{__file__}.json", copy.deepcopy(optimizer)))
    with open(f"{__file__}.json") as file:
        found["mp.spawn"] = json.load(file)
    code = "import gc, os; print(gc.isenabled(), gc.get_threshold(), gc.collect, os.getenv('PYTHONPATH'))"
    found["python"] = subprocess.check_output([sys.executable, "-c", code], text=True).partition(" at ")[0]
    print(json.dumps([found, look()]))

if __name__ == "__main__":
    main()
"""


def test_children_are_as_without_us(tmp_path: Path) -> None:
    without, found = run_code(PROGRAM, tmp_path, None), run_code(PROGRAM, tmp_path)
    assert isinstance(without, list) and isinstance(found, list)
    ways = ["fork", "forked", "loader fork", "loader spawn", "mp.spawn", "python", "spawn"]
    assert sorted(found[0]) == ways
    assert found[0] == without[0]
    own, before = found[1], without[1]
    assert (before[2], before[5]) == (0, False)
    assert own[2] > 1000 and own[5], "the rank itself has the policy"


def test_forked_children_of_a_disabled_collector_have_it(tmp_path: Path) -> None:
    code = """
import gc, json, os
source, sink = os.pipe()
found = [gc.isenabled()]
child = os.fork()
if not child:
    os.write(sink, bytes([gc.isenabled()]))
    os._exit(0)
os.waitpid(child, 0)
print(json.dumps([*found, os.read(source, 1)[0]]))
"""
    assert run_code(code, tmp_path, "disabled,every=5") == [False, 1]
    mine = code.replace("found =", "gc.disable(); gc.set_threshold(5); found =")
    assert run_code(mine, tmp_path) == [False, 0]
