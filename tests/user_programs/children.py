"""Starts processes in all ways that a program has."""

import concurrent.futures
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass

import sibling
import torch
import torch.multiprocessing


@dataclass
class Item:
    number: int

    def double(self):
        return Item(2 * self.number)


def double(item):
    return item.double()


def fill(tensor, number):
    tensor.fill_(number)


def fail():
    raise ValueError("in a child")


def describe(queue):
    queue.put(
        (
            sys.argv,
            __name__,
            os.path.basename(sys.modules["__main__"].__file__),
            "LAUNCH_WARM" in os.environ,
            signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        )
    )


class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.items = [Item(number) for number in range(16)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return torch.full((2,), float(self.items[index].double().number)), torch.rand(1)


def main():
    torch.manual_seed(0)
    print(sibling.TEXT.split())
    for method in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            print(method, pool.map(double, map(Item, range(3))))
        queue = context.Queue()
        process = context.Process(target=describe, args=(queue,))
        process.start()
        print(method, queue.get())
        process.join()
        loader = torch.utils.data.DataLoader(
            Data(),
            batch_size=4,
            num_workers=1,
            multiprocessing_context=method,
            shuffle=True,
            generator=torch.Generator().manual_seed(1),
        )
        print(method, [(batch.tolist(), noise.sum().item().hex()) for batch, noise in loader])
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        print(list(executor.map(torch.ones, range(3))))
    shared = torch.zeros(3).share_memory_()
    worker = torch.multiprocessing.get_context("fork").Process(target=fill, args=(shared, 5))
    worker.start()
    worker.join()
    print(shared)
    failing = multiprocessing.get_context("fork").Process(target=fail)
    failing.start()
    failing.join()
    print(failing.exitcode)
    code = "import sys, os; print(sys.argv, sys.path[0], sorted(k for k in os.environ if 'WARM' in k), 'torch' in sys.modules)"
    print(
        subprocess.run([sys.executable, "-c", code, "x"], capture_output=True, text=True, check=True).stdout
    )
    print(subprocess.run("kill -TERM $$", shell=True, check=False).returncode)
    child = os.fork()
    if not child:
        print("a forked child")
        sys.stdout.flush()
        os._exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(pickle.loads(pickle.dumps(Item(3))))


if __name__ == "__main__":
    main()
