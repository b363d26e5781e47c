"""Short work on each device of this node, measured: `python -m launcher.programs.node_work --kind light`.

It prints lines of JSON: first what torch there is, then a line for each piece of work. What fails, hangs or
finds no time is a line too, with `problem` or `reason`. Each GPU has its own process, and all CPUs together
have one where there is no GPU; they end with this one: nothing stays on a GPU. With
`--pair HOST:PORT --pair-rank 0|1` two nodes meet at HOST, on which rank 0 runs, and measure what is between
them. Groups, of a node's GPUs or of two nodes' devices, talk by NCCL, and by gloo without GPUs.
"""

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import statistics
import struct
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

import torch
import torch.distributed as dist

from launcher.programs.measurement import Measurement, TorchBuild

SECONDS = {"light": 10.0, "deep": 60.0}
DURATIONS = {
    "light": {"matmul": 2.0, "memory": 0.5, "copies": 0.6, "all_reduce": 0.6, "pair": 1.0},
    "deep": {"matmul": 8.0, "memory": 3.0, "copies": 3.0, "all_reduce": 3.0, "pair": 3.0},
}
"""Seconds to measure."""
ENOUGH = {"light": 8.0, "deep": 27.0}
"""Seconds for a run in which nothing has to be shortened."""
SLACK = 0.5
"""Seconds that are kept for the end."""
GRACE, LEAST = 5.0, 2.0
"""Seconds that a piece of work may take beyond those to measure before it counts as hung; the same in a run
whose time is over, if others have answered."""
START = 20.0
"""Seconds that CUDA may take to start."""
NO_TIME = "no time was left"
PR_SET_PDEATHSIG, SIOCGIFADDR = 1, 0x8915
SIZES, CPU_SIZE = (8192, 4096, 2048, 1024), 2048
"""Rows and columns of the matrices on a GPU; the largest of which five take an eighth of the free memory."""
TILE = 1024
WARM_UP, WINDOW = 0.2, 0.1
"""Seconds before a GPU's clocks are where they stay, and of a repeat."""
COPY_BYTES, CPU_BYTES = 128 << 20, 512 << 20
COPIES, REPEATS = 4, 5
"""Copies of a repeat on a GPU, and repeats of an all_reduce; the best repeat counts."""
GROUP_BYTES, CPU_GROUP_BYTES = 512 << 20, 16 << 20
LONGEST = 300
"""Characters of an error."""


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Do the work, and end at once, also if a process is stuck in a driver."""
    parser = argparse.ArgumentParser(prog="node_work", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--kind", choices=SECONDS, default="light")
    parser.add_argument("--seconds", type=float, help="for all, torch's import included; 10 or 60")
    parser.add_argument(
        "--begin", type=float, help="monotonic time from which they count; else now, after torch's import"
    )
    parser.add_argument("--pair", metavar="HOST:PORT", help="measure between two nodes that meet there")
    parser.add_argument("--pair-rank", type=int, choices=(0, 1), default=0)
    parser.add_argument("--pair-name", default="", help="what the pair is called in the result: n1-n2")
    options = parser.parse_args(words)
    # Stdout is for the results alone: what libraries print there goes to stderr.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    multi_threaded = "This process .* is multi-threaded"
    warnings.filterwarnings("ignore", message=multi_threaded, category=DeprecationWarning)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    begin, seconds = options.begin or time.monotonic(), options.seconds or SECONDS[options.kind]
    work = NodeWork(options.kind, begin + seconds, seconds, out)
    work.print(TorchBuild(torch.__version__, torch.version.cuda or ""))
    try:
        processes = work.start(is_pair=bool(options.pair))
        if processes and options.pair:
            work.measure_pair(processes, options.pair, options.pair_rank, options.pair_name or options.pair)
        elif processes:
            work.measure_node(processes)
    except Exception as error:
        work.print(Measurement("matmul", "node", problem=describe_error(error)))
    finally:
        out.flush()
        os._exit(0)


class NotMeasuredError(Exception):
    """Why something was not measured, if that says nothing of the device."""


def describe_error(error: Exception) -> str:
    """Return an error on one line, cut off if it is long."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


@dataclass(slots=True)
class Device:
    """A GPU by torch's index, or all CPUs of this process together (None)."""

    index: int | None
    name: str = ""
    """Kind of device, once it is known."""
    uuid: str = ""

    @property
    def where(self) -> str:
        """For people."""
        return "CPU" if self.index is None else f"GPU {self.index}"

    @property
    def torch(self) -> torch.device:
        """For torch."""
        return torch.device("cpu") if self.index is None else torch.device("cuda", self.index)

    def result(
        self, measure: str, value: float | None = None, unit: str = "GB/s", **more: str
    ) -> Measurement:
        """Return what was measured on it."""
        more |= {"device": self.name, "uuid": self.uuid}
        return Measurement(measure, self.where, value, unit if value else "", **more)

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds that it takes for what a function gives it to do."""
        self.synchronize()
        begin = time.perf_counter()
        work()
        self.synchronize()
        return max(time.perf_counter() - begin, 1e-9)

    def repeat(self, work: Callable[[], object], seconds: float) -> list[float]:
        """Do it for some seconds, once at the least; return the seconds of each repeat."""
        times: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end or not times:
            times.append(self.time(work))
        return times

    def synchronize(self) -> None:
        """Wait until a GPU has done what it was told."""
        if self.index is not None:
            torch.cuda.synchronize(self.index)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process has said to a call."""

    value: Any = None
    problem: str = ""
    reason: str = ""
    """Why it was not asked, or not waited for."""
    is_late: bool = False
    """It has not answered in time, and was ended."""


class WorkProcess:
    """A process for one device, which calls functions with it as their first argument.

    It is forked from this one, which has imported torch and started nothing of it, so that many start fast
    and share its memory. One that a driver keeps in the kernel cannot be killed: it is left behind.
    """

    def __init__(self, index: int | None, name: str = "") -> None:
        """Start it."""
        self.device = Device(index, name)
        self.problem = ""
        """Why it can do no more."""
        context = multiprocessing.get_context("fork")
        self.connection, inner = context.Pipe()
        self.process = context.Process(target=self._serve, args=(inner, os.getpid()), daemon=True)
        self.process.start()
        inner.close()

    def _serve(self, connection: "Connection[Any, Any]", parent: int) -> None:
        """Call the functions that the other end names, until it closes."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        try:
            while True:
                function, arguments = connection.recv()
                try:
                    answer = Answer(function(self.device, *arguments))
                except NotMeasuredError as error:
                    answer = Answer(reason=str(error))
                except Exception as error:
                    answer = Answer(problem=describe_error(error))
                connection.send(answer)
        except (EOFError, OSError, KeyboardInterrupt):
            return

    def give_up(self, problem: str = "") -> None:
        """End it, without waiting for that; without a problem, one that has ended says how."""
        if not problem:
            self.process.join(1.0)
            code = self.process.exitcode
            how = f"was ended by signal {-code}" if code and code < 0 else f"ended with exit code {code}"
            problem = f"its process {how}"
        self.problem = problem
        self.process.kill()
        self.connection.close()


@dataclass(frozen=True, slots=True)
class NodeWork:
    """A run of this program, and the time that it has."""

    kind: str
    deadline: float
    """Monotonic time at which it has to be at its end."""
    seconds: float
    """Of the whole run."""
    out: TextIO

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - SLACK - time.monotonic()

    def take(self, name: str) -> float:
        """Return the seconds for a measurement; less in a short run."""
        return DURATIONS[self.kind][name] * min(1.0, max(0.05, self.seconds / ENOUGH[self.kind]))

    def print(self, value: TorchBuild | Measurement) -> None:
        """Print a line of JSON."""
        print(json.dumps(asdict(value)), file=self.out, flush=True)

    def print_failure(self, asked: Measurement, answer: Answer) -> None:
        """Print what was asked of a process whose answer has no value."""
        problem = "" if answer.reason else answer.problem or "it has no result"
        self.print(replace(asked, problem=problem, reason=answer.reason))

    def ask(
        self,
        processes: Sequence[WorkProcess],
        function: Callable[..., object],
        *arguments: object,
        seconds: float = 0.0,
        grace: float = GRACE,
        least: float = LEAST,
        first: int | None = None,
    ) -> list[Answer]:
        """Have all processes call a function at once that takes about `seconds`; one answer for each.

        With `first`, that process's rank in a group, each gets its rank as the last argument. A process that
        does not answer is ended. If the run's time is over before `grace`, being late speaks against a device
        only if others have answered, and `least` seconds of grace have passed.
        """
        limit = min(seconds + grace, self.left)
        if self.left < seconds:
            return [Answer(problem=one.problem, reason=NO_TIME) for one in processes]
        deadline = time.monotonic() + limit
        waiting: dict[Any, WorkProcess] = {}
        answers: dict[WorkProcess, Answer] = {}
        for number, one in enumerate(processes):
            if one.problem:
                continue
            ranks = () if first is None else (first + number,)
            try:
                one.connection.send((function, (*arguments, *ranks)))
                waiting[one.connection] = one
            except OSError:
                one.give_up()
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                one = waiting.pop(connection)
                try:
                    answers[one] = one.connection.recv()
                except (EOFError, OSError):
                    one.give_up()
        is_excused = limit < seconds + grace and (len(waiting) == len(processes) or limit < seconds + least)
        for one in waiting.values():
            one.give_up(f"no answer within {limit:.0f} s")
            late = Answer(problem=one.problem, is_late=True)
            answers[one] = Answer(reason=NO_TIME) if is_excused else late
        return [answers.get(one, Answer(problem=one.problem)) for one in processes]

    def start(self, *, is_pair: bool) -> list[WorkProcess]:
        """Start a process for each GPU that torch sees, or one for all CPUs; report those that fail.

        Another process asks for the GPUs: this one has to stay without CUDA, since it forks. Empty if
        CUDA does not answer, and for a pair if a GPU fails: the other node would wait for it.
        """
        count = 0
        if torch.version.cuda or torch.version.hip:
            asking = WorkProcess(None)
            (answer,) = self.ask([asking], count_torch_gpus, grace=START)
            asking.give_up("it is not needed any more")
            if answer.value is None:
                self.print_failure(Measurement("matmul", "node"), answer)
                return []
            count = answer.value
        processes = [WorkProcess(index) for index in range(count)]
        if not processes:
            name = read_field("/proc/cpuinfo", "model name") or os.uname().machine
            return [WorkProcess(None, f"{name}, {len(os.sched_getaffinity(0))} CPUs")]
        for one, answer in zip(processes, self.ask(processes, start_gpu, grace=START), strict=True):
            if answer.value:
                one.device = answer.value
            else:
                self.print_failure(one.device.result("matmul"), answer)
                one.give_up(answer.problem or answer.reason)
        live = [one for one in processes if not one.problem]
        return [] if is_pair and len(live) < len(processes) else live

    def measure_node(self, processes: Sequence[WorkProcess]) -> None:
        """Measure this node's devices, all at once in each part; a line for each that has no result, too."""
        is_gpu = processes[0].device.index is not None
        second = ("copies", measure_copies, "copy_to") if is_gpu else ("memory", measure_memory, "memory")
        for duration, function, measure in (("matmul", measure_matmul, "matmul"), second):
            # CPUs that are late are busy, and not broken.
            seconds, grace = self.take(duration), GRACE if is_gpu else self.left
            answers = self.ask(processes, function, seconds, seconds=seconds, grace=grace)
            for one, answer in zip(processes, answers, strict=True):
                if answer.value is None:
                    self.print_failure(one.device.result(measure), answer)
                for found in answer.value or ():
                    self.print(found)
        live = [one for one in processes if not one.problem]
        if len(live) > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            asked = Measurement("all_reduce", "node", device=f"{live[0].device.name}, {len(live)} GPUs")
            limit = max(1.0, self.left)
            group = Group(len(live), "127.0.0.1", port, self.take("all_reduce"), limit)
            self.measure_group(live, asked, group, 0, max(GRACE, limit / 2))

    def measure_pair(self, processes: Sequence[WorkProcess], meeting: str, rank: int, name: str) -> None:
        """Report the bandwidth between this node and the other; both have to have as many devices."""
        host, _, port = meeting.rpartition(":")
        count, limit = len(processes), max(1.0, self.left - 1.0)
        group = Group(2 * count, host, int(port), self.take("pair"), limit)
        asked = Measurement("pair", name, device=f"{processes[0].device.name}, {count} on each node")
        self.measure_group(processes, asked, group, rank * count, limit)

    def measure_group(
        self, processes: Sequence[WorkProcess], asked: Measurement, group: "Group", first: int, grace: float
    ) -> None:
        """Report a group's GB/s, or the first failure that is more than being left by another.

        `first` is the rank of the first process.
        """
        seconds = group.seconds
        answers = self.ask(
            processes, measure_all_reduce, group, seconds=seconds, grace=grace, least=GRACE, first=first
        )
        if missing := [answer for answer in answers if answer.value is None]:
            cause = min(missing, key=lambda answer: (answer.is_late, answer.reason == NO_TIME))
            self.print_failure(asked, cause)
        else:
            self.print(replace(asked, value=min(answer.value for answer in answers), unit="GB/s"))


def count_torch_gpus(_: object) -> int:
    """Return how many GPUs torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def start_gpu(device: Device) -> Device:
    """Make the GPU's context, on the CPUs next to it if those are known; return it with name and UUID."""
    torch.cuda.set_device(device.torch)
    found = torch.cuda.get_device_properties(device.torch)
    numbers = [getattr(found, name, 0) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    # Pinned memory is to be in the GPU's NUMA node.
    with contextlib.suppress(OSError):
        pci = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
        text = Path(f"/sys/bus/pci/devices/{pci}/local_cpulist").read_text().strip()
        ranges = [part.partition("-") for part in text.split(",") if part]
        near = {cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1)}
        if near := near & os.sched_getaffinity(0):
            os.sched_setaffinity(0, near)
    torch.zeros(1, device=device.torch)
    torch.cuda.synchronize()
    device.name, uuid = found.name, str(getattr(found, "uuid", "")).removeprefix("GPU-")
    device.uuid = f"GPU-{uuid}" if uuid else ""
    return device


def read_field(path: str, name: str) -> str:
    """Return what a file of procfs has after a name and a colon, the first time; empty if it has nothing."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(path).read_text(errors="replace").splitlines()
        return next(line for line in lines if line.startswith(name)).partition(":")[2].strip()
    return ""


def make_matrix(size: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a square matrix of values in [-1, 1) that follow from whole numbers, the same on any machine.

    A large one is made of equal blocks of TILE rows and columns.
    """
    side = min(size, TILE)
    numbers = torch.arange(side * side, dtype=torch.int64) * 1103515245 + seed
    tile = (((numbers >> 8) % 4099).to(torch.float32) / 2049.5 - 1).to(dtype).reshape(side, side)
    return tile.to(device).repeat(size // side, size // side)


def hash_tensor(tensor: torch.Tensor) -> str:
    """Return a checksum of a tensor's bits, with its size: `512:9f86d081884c7d65`."""
    here = tensor.detach().cpu().contiguous()
    data = (ctypes.c_char * here.nbytes).from_address(here.data_ptr())  # torch needs numpy for its own ways
    return f"{tensor.shape[0]}:{hashlib.sha256(data).hexdigest()[:16]}"


def measure_matmul(device: Device, seconds: float) -> list[Measurement]:
    """Multiply matrices, bf16 on a GPU and fp32 on CPUs, in TFLOPS by the clock on the wall.

    The median of windows counts on a GPU, since clocks that fall under load count; the best on CPUs, which
    others use for moments. On a GPU each window's last product has to have the bits of the first; on CPUs the
    order of the sums depends on the threads.
    """
    size, dtype, warm = CPU_SIZE, torch.float32, 1
    if is_gpu := device.index is not None:
        free = torch.cuda.mem_get_info(device.index)[0]
        size = next((size for size in SIZES if 5 * 2 * size * size <= free // 8), SIZES[-1])
        dtype, warm = torch.bfloat16, 3
    left, right = (make_matrix(size, seed, dtype, device.torch) for seed in (12345, 54321))
    first = left @ right
    product = torch.empty_like(first)
    different = torch.zeros((), dtype=torch.int64, device=device.torch)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=product)
        if is_gpu:
            different.add_((product != first).any())

    device.time(lambda: multiply(warm))
    count = max(1, int(warm * WINDOW / device.time(lambda: multiply(warm))))
    warm_up = min(WARM_UP, seconds / 2) if is_gpu else 0.0
    if warm_up:
        device.repeat(lambda: multiply(count), warm_up)
    times = device.repeat(lambda: multiply(count), seconds - warm_up)
    checksum = hash_tensor(first) if is_gpu else ""
    if int(different.item()):
        problem = "its results differ from one product to the next"
        return [device.result("matmul", None, "TFLOPS", checksum=checksum, problem=problem)]
    usual = statistics.median(times) if is_gpu else min(times)
    return [device.result("matmul", count * 2 * size**3 / usual / 1e12, "TFLOPS", checksum=checksum)]


def measure_memory(device: Device, seconds: float) -> list[Measurement]:
    """Copy between two buffers that no cache holds, by all CPUs; GB/s read and written, the best of repeats.

    Both take a tenth of the available memory at most.
    """
    kib = read_field("/proc/meminfo", "MemAvailable:").removesuffix(" kB")
    source = torch.ones(min(CPU_BYTES, (int(kib) * 1024 if kib else 1 << 30) // 20) // 4)
    return [device.result("memory", 2 * copy_for(seconds, device, torch.zeros_like(source), source))]


def measure_copies(device: Device, seconds: float) -> list[Measurement]:
    """Copy from pinned memory to the GPU and back; the bits have to come back as they were."""
    size = min(COPY_BYTES, torch.cuda.mem_get_info(device.index)[0] // 16)
    here = torch.arange(size // 8, dtype=torch.int64).pin_memory()
    back = torch.empty_like(here).pin_memory()
    there = torch.empty(here.shape, dtype=here.dtype, device=device.torch)
    to_gpu = copy_for(seconds / 2, device, there, here)
    from_gpu = copy_for(seconds / 2, device, back, there)
    problem = "" if torch.equal(here, back) else "what was copied to it came back with other bits"
    return [device.result("copy_to", to_gpu, problem=problem), device.result("copy_from", from_gpu)]


def copy_for(seconds: float, device: Device, target: torch.Tensor, source: torch.Tensor) -> float:
    """Copy for some seconds; return GB/s, the best of repeats."""
    copies = 1 if device.index is None else COPIES  # on busy CPUs one takes long enough

    def copy() -> None:
        for _ in range(copies):
            target.copy_(source, non_blocking=True)

    device.time(copy)
    return copies * source.nbytes / min(device.repeat(copy, seconds)) / 1e9


class Group(NamedTuple):
    """Processes that measure together, and where they meet: rank 0 opens a store there."""

    size: int
    host: str
    port: int
    seconds: float
    """To measure."""
    limit: float
    """Seconds for an operation of the group, and to meet."""


def measure_all_reduce(device: Device, group: Group, rank: int) -> float:
    """Return the bus bandwidth of all_reduce in GB/s: 2 (n - 1) / n of the bytes over the time.

    The best of REPEATS counts, by the process that is slowest in it. Source: NVIDIA's nccl-tests,
    doc/PERFORMANCE.md. Raises ValueError for wrong sums.
    """
    is_gpu, is_server = device.index is not None, rank == 0
    limit = timedelta(seconds=group.limit)
    try:
        store = dist.TCPStore(
            group.host, group.port, group.size, is_master=is_server, wait_for_workers=False, timeout=limit
        )
    except dist.DistNetworkError as error:
        if is_server:  # somebody else has the port
            raise NotMeasuredError(describe_error(error)) from None
        raise
    if not is_gpu and (interface := find_interface(store, group.host, rank)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    backend, prefixed = "nccl" if is_gpu else "gloo", dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=group.size, timeout=limit)

    def find_largest(number: float) -> float:
        value = torch.tensor([number], dtype=torch.float64, device=device.torch)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value.item())

    def run(count: int) -> float:
        """Return the seconds of some all_reduces of zeros, begun together, on the slowest process."""
        dist.barrier(device_ids=[device.index]) if is_gpu else dist.barrier()
        return find_largest(device.time(lambda: [dist.all_reduce(tensor) for _ in range(count)]))

    try:
        size = CPU_GROUP_BYTES
        if is_gpu:
            # The same size on all processes: a sixteenth of the smallest free memory at most.
            size = min(GROUP_BYTES, int(-find_largest(-torch.cuda.mem_get_info(device.index)[0])) // 16)
        tensor = torch.zeros(size // 4, device=device.torch)
        run(2)
        count = max(1, min(200, int(group.seconds / REPEATS / max(run(1), 1e-6))))
        best = min(run(count) for _ in range(REPEATS)) / count
        tensor.fill_(1.0)
        dist.all_reduce(tensor)
        wrong = int((tensor != float(group.size)).sum())
        if wrong:
            raise ValueError(f"all_reduce gave {wrong} wrong sums of {tensor.numel()}")
    finally:
        dist.destroy_process_group()
    return 2 * (group.size - 1) / group.size * tensor.nbytes / best / 1e9


def find_interface(store: dist.TCPStore, host: str, rank: int) -> str:
    """Return the network interface towards the peer's node for gloo; empty if there is none.

    gloo by itself takes the address of the host's name, which may be that of loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        mine = ""
        with contextlib.suppress(OSError):
            probe.connect((host if rank else store.get("address").decode(), 9))  # sends nothing
            mine = str(probe.getsockname()[0])
        if rank:
            store.set("address", mine)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == mine:
                    return name
    return ""


if __name__ == "__main__":
    main()
