"""An all_reduce among a node's devices, or between those of two nodes: NCCL for GPUs, gloo for CPUs."""

import fcntl
import os
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from launcher.programs.cpu_work import CpuState
from launcher.programs.gpu_work import GpuState
from launcher.programs.work_processes import NotMeasuredError, describe_error

SIOCGIFADDR = 0x8915
REPEATS = 5
"""The best of so many repeats counts."""
GPU_BYTES, CPU_BYTES = 512 << 20, 16 << 20
Device = CpuState | GpuState


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A process's place in a group."""

    rank: int
    world_size: int
    host: str
    port: int
    seconds: float
    """To measure."""
    limit: float
    """Seconds for an operation of the group, and to meet."""
    is_pair: bool = False
    """The group is that of two nodes."""


def open_store(state: Device, world_size: int) -> int:
    """Open the node's store for a group, and return its port."""
    state.store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    return int(state.store.port)


def measure_all_reduce(state: Device, place: GroupPlace) -> float:
    """Return the bus bandwidth of all_reduce in GB/s: 2 (n - 1) / n of the bytes over the time.

    The best of REPEATS counts, by the process that is slowest in it. Source: NVIDIA's nccl-tests,
    doc/PERFORMANCE.md.
    """
    store = state.store or meet(place)
    if isinstance(state, CpuState) and (interface := choose_interface(store, place)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    backend = "nccl" if isinstance(state, GpuState) else "gloo"
    device = torch.device("cuda", state.index) if isinstance(state, GpuState) else torch.device("cpu")
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=place.limit),
    )
    try:
        tensor = make_tensor(device, place)
        best = time_all_reduce(tensor, device, place.seconds)
        check_sum(tensor)
    finally:
        dist.destroy_process_group()
    size = tensor.numel() * tensor.element_size()
    return 2 * (place.world_size - 1) / place.world_size * size / best / 1e9


def meet(place: GroupPlace) -> TCPStore:
    """Meet the other processes at the group's store; with a pair, rank 0 opens it."""
    is_server = place.is_pair and place.rank == 0
    try:
        return TCPStore(
            place.host,
            place.port,
            place.world_size,
            is_master=is_server,
            wait_for_workers=False,
            timeout=timedelta(seconds=place.limit),
        )
    except dist.DistNetworkError as error:
        if is_server:  # somebody else has the port
            raise NotMeasuredError(describe_error(error)) from None
        raise


def make_tensor(device: torch.device, place: GroupPlace) -> torch.Tensor:
    """Return zeros of the same size on all processes: a sixteenth of the smallest free memory at most."""
    if device.type == "cpu":
        return torch.zeros(CPU_BYTES // 4)
    free = torch.tensor([torch.cuda.mem_get_info(device)[0]], device=device, dtype=torch.int64)
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    return torch.zeros(min(GPU_BYTES, int(free.item()) // 16) // 4, device=device)


def time_all_reduce(tensor: torch.Tensor, device: torch.device, seconds: float) -> float:
    """Return the seconds of one all_reduce: of the best repeat, on the process that is slowest in it."""
    run_all_reduce(tensor, device, 2)
    once = agree_on_slowest(run_all_reduce(tensor, device, 1), device)
    count = max(1, min(200, int(seconds / REPEATS / max(once, 1e-6))))
    times = [agree_on_slowest(run_all_reduce(tensor, device, count), device) for _ in range(REPEATS)]
    return min(times) / count


def run_all_reduce(tensor: torch.Tensor, device: torch.device, count: int) -> float:
    """Return the seconds of some all_reduces of zeros, begun together."""
    dist.barrier() if device.type == "cpu" else dist.barrier(device_ids=[device.index])
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    synchronize(device)
    return time.perf_counter() - begin


def agree_on_slowest(seconds: float, device: torch.device) -> float:
    """Return the largest of all processes' values."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def check_sum(tensor: torch.Tensor) -> None:
    """Sum ones over the processes; raises ValueError for any other result than their number."""
    tensor.fill_(1.0)
    dist.all_reduce(tensor)
    expected = float(dist.get_world_size())
    if not bool((tensor == expected).all()):
        wrong = int((tensor != expected).sum())
        raise ValueError(f"all_reduce gave {wrong} wrong sums of {tensor.numel()}")


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def choose_interface(store: Store, place: GroupPlace) -> str:
    """Return the network interface for gloo: the user's, loopback in a node, else the one towards the peer.

    gloo by itself takes the address of the host's name, which may be that of loopback. Empty leaves it so.
    """
    if not place.is_pair:
        return "lo" if any(name == "lo" for _, name in socket.if_nameindex()) else ""
    if place.rank == 0:
        mine = find_local_address(store.get("address").decode())
    else:
        mine = find_local_address(place.host)
        store.set("address", mine)
    return os.environ.get("GLOO_SOCKET_IFNAME") or find_interface(mine)


def find_local_address(host: str) -> str:
    """Return the IPv4 address by which this node reaches another; empty if there is none.

    Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def find_interface(address: str) -> str:
    """Return the network interface with an IPv4 address; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""
