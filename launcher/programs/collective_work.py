"""An all_reduce among a node's GPUs, or between two nodes: NCCL for GPUs, gloo for CPUs."""

import fcntl
import os
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from launcher.programs.device_work import Device, synchronize
from launcher.programs.work_processes import NotMeasuredError, describe_error

SIOCGIFADDR = 0x8915
REPEATS = 5
"""The best of so many repeats counts."""
GPU_BYTES, CPU_BYTES = 512 << 20, 16 << 20


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


def open_store(device: Device, world_size: int) -> int:
    """Open the node's store for a group, and return its port."""
    device.store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    return int(device.store.port)


def measure_all_reduce(device: Device, place: GroupPlace) -> float:
    """Return the bus bandwidth of all_reduce in GB/s: 2 (n - 1) / n of the bytes over the time.

    The best of REPEATS counts, by the process that is slowest in it. Source: NVIDIA's nccl-tests,
    doc/PERFORMANCE.md. Raises ValueError for wrong sums.
    """
    store = device.store or _meet(place)
    if device.index is None and (interface := _choose_interface(store, place)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group(
        "gloo" if device.index is None else "nccl",
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=place.limit),
    )
    try:
        if device.index is None:
            tensor = torch.zeros(CPU_BYTES // 4)
        else:
            # The same size on all processes: a sixteenth of the smallest free memory at most.
            free = -_find_largest(-torch.cuda.mem_get_info(device.index)[0], device)
            tensor = torch.zeros(min(GPU_BYTES, int(free) // 16) // 4, device=device.torch)
        _run(tensor, device, 2)
        once = _run(tensor, device, 1)
        count = max(1, min(200, int(place.seconds / REPEATS / max(once, 1e-6))))
        best = min(_run(tensor, device, count) for _ in range(REPEATS)) / count
        tensor.fill_(1.0)
        dist.all_reduce(tensor)
        wrong = int((tensor != float(place.world_size)).sum())
        if wrong:
            raise ValueError(f"all_reduce gave {wrong} wrong sums of {tensor.numel()}")
    finally:
        dist.destroy_process_group()
    size = tensor.numel() * tensor.element_size()
    return 2 * (place.world_size - 1) / place.world_size * size / best / 1e9


def _meet(place: GroupPlace) -> TCPStore:
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


def _run(tensor: torch.Tensor, device: Device, count: int) -> float:
    """Return the seconds of some all_reduces of zeros, begun together, on the slowest process."""
    dist.barrier() if device.index is None else dist.barrier(device_ids=[device.index])
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    synchronize(device)
    return _find_largest(time.perf_counter() - begin, device)


def _find_largest(number: float, device: Device) -> float:
    """Return the largest of all processes' numbers."""
    value = torch.tensor([number], dtype=torch.float64, device=device.torch)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def _choose_interface(store: TCPStore, place: GroupPlace) -> str:
    """Return the network interface for gloo between two nodes: the user's, else the one towards the peer.

    gloo by itself takes the address of the host's name, which may be that of loopback. Empty leaves it so.
    """
    if place.rank == 0:
        mine = _find_local_address(store.get("address").decode())
    else:
        mine = _find_local_address(place.host)
        store.set("address", mine)
    return os.environ.get("GLOO_SOCKET_IFNAME") or _find_interface(mine)


def _find_local_address(host: str) -> str:
    """Return the IPv4 address by which this node reaches another, without sending; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _find_interface(address: str) -> str:
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
