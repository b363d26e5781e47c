"""Training programs that wait for data, as users write them."""

from tests.inprocess.hooked import WITHOUT_COMPILER

LOADING = f"""\
import os, time
{WITHOUT_COMPILER}
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(4)
"""

TRAINING = (
    LOADING
    + """
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, batch in enumerate(DataLoader(Slow(), batch_size=10)):
    optimizer.zero_grad()
    model(batch).sum().backward()
    time.sleep(0.04)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    print("step", step, os.getpid(), flush=True)
"""
)
"""Loading takes 0.1 s, computing 0.04 s: 3 workers."""

ALONE = (
    LOADING
    + """
options = eval(sys.argv[1])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if "eval" not in sys.argv else None
pace = float(os.environ.get("PACE", "0.005"))
for step, batch in enumerate(DataLoader(Slow(), **{"batch_size": 1, **options})):
    loss = model(batch).sum()
    time.sleep(pace)
    if optimizer:
        loss.backward()
        optimizer.step()
    if str(step) in sys.argv:
        break
print("the end", flush=True)
"""
)
"""Without other ranks: options of its DataLoader, then the step to end after, and `eval`."""
