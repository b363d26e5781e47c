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

BATCHES = f"""\
import argparse, resource, time
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=1)
parser.add_argument("--limit-mib", type=int, default=0)
parser.add_argument("--knee", type=int, default=8)
parser.add_argument("--catch", action="store_true")
parser.add_argument("--divides", type=int, default=0)
options = parser.parse_args()
assert options.divides % options.batch_size == 0, "the batch must divide"
{WITHOUT_COMPILER}
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
if options.limit_mib:
    pages = int(open("/proc/self/statm").read().split()[0])
    most = (options.limit_mib << 20) + pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    activations = torch.ones(options.batch_size, 1 << 21)  # 8 MiB a sequence
except RuntimeError as error:
    if not options.catch:
        raise
    print("this batch is too large:", error, flush=True)
    sys.exit(0)
for (batch,) in DataLoader(TensorDataset(torch.ones(100_000, 64)), batch_size=options.batch_size):
    optimizer.zero_grad()
    model(activations[:, :64]).sum().backward()
    time.sleep(0.05 * max(1, len(batch) / options.knee))
    optimizer.step()
"""
"""Takes 8 MiB a sequence, under a limit of the address space that it sets; as fast from the knee on."""
