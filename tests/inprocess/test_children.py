"""What a rank's program starts has the collector as it would have had it, and counts no steps."""

from pathlib import Path

import pytest

from tests.inprocess.hooked import WITHOUT_COMPILER, run_code

LOOK = """
import gc, json, os, sys

def look():
    kinds = type(gc.collect).__name__, type(gc.get_objects).__name__
    state = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
    return [*state, *kinds, os.environ.get("PYTHONPATH")]
"""
TELL = f"{LOOK}\nprint(json.dumps(look()))"
"""What a child is to find, told by an interpreter that has nothing of ours."""
PROGRAM = (
    f"{LOOK}\nTELL = {TELL!r}{WITHOUT_COMPILER}"
    + """
import copy, multiprocessing, subprocess
import torch.multiprocessing

def is_hooked():
    return any(module.startswith("launch_inprocess") for module in sys.modules)

class Looks(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return json.dumps(look())

def train(optimizer, steps):
    for _ in range(steps):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

def tell_steps(pipe, optimizer):
    train(optimizer, 20)
    pipe.send(look())

def spawned(_, path, optimizer):
    train(optimizer, 20)
    with open(path, "w") as file:
        json.dump([look(), is_hooked()], file)

def fork_once():
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        os.write(sink, json.dumps(look()).encode())
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
        found[f"loader {way}"] = json.loads([batch for batch in loader][0][0])
    ends = multiprocessing.Pipe()
    start = multiprocessing.get_context("fork").Process
    child = start(target=tell_steps, args=(ends[0], copy.deepcopy(optimizer)))
    child.start()
    found["fork"] = ends[1].recv()
    child.join()
    torch.multiprocessing.spawn(spawned, (f"{__file__}.json", copy.deepcopy(optimizer)))
    with open(f"{__file__}.json") as file:
        found["spawn"], hooked = json.load(file)
    found["python"] = json.loads(subprocess.check_output([sys.executable, "-c", TELL], text=True))
    print(json.dumps([found, hooked, look(), is_hooked()]))

if __name__ == "__main__":
    main()
"""
)


@pytest.mark.slow
def test_children_are_as_without_us(tmp_path: Path) -> None:
    without, found = run_code(TELL, tmp_path, None), run_code(PROGRAM, tmp_path)
    assert isinstance(found, list)
    children, child_hooked, own, own_hooked = found
    assert children == dict.fromkeys(
        ["fork", "forked", "loader fork", "loader spawn", "spawn", "python"], without
    )
    assert not child_hooked, "nothing of ours is loaded in what is started anew"
    assert own[2] > 1000 and own_hooked, "the rank itself has the policy"
