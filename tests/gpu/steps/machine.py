"""What `launch` makes of this machine: topo, plan and doctor, kept, and a plan from the snapshot."""

import json
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.gpu.context import Context

LOOKED_AT = (
    *("/proc/driver/nvidia/version", "/proc/driver/nvidia/gpus/*/*", "/proc/driver/nvidia/capabilities/*"),
    *("/dev/nvidia*", "/dev/dxg", "/dev/kfd", "/sys/bus/pci/drivers/nvidia/*", "/sys/class/infiniband/*"),
    *("/sys/fs/cgroup/cpu.max", "/proc/self/cgroup", "/sys/devices/system/node/node*/cpulist"),
    *("/sys/devices/system/cpu/online", "/proc/sys/kernel/osrelease", "/proc/meminfo", "/etc/hosts"),
)
"""Files that go to the log, so that the machine's shape can be studied afterwards."""
SMI = (("nvidia-smi",), ("nvidia-smi", "-L"), ("nvidia-smi", "topo", "-m"), ("nvidia-smi", "-q"))


def run(context: Context) -> None:
    """Keep machine.json, plan.json, plan.txt and doctor.json."""
    with context.record.part("the machine's files are listed"):
        show_files()
        time_host_name(context)
    with context.record.part("topo and plan"):
        keep_plans(context)
    with context.record.part("doctor"):
        keep_doctor(context)


def keep_plans(context: Context) -> None:
    """Keep the machine and its plan; the plan from the snapshot has to be the same."""
    record, output = context.record, context.output
    saved = context.verb("topo", "topo", "save=machine.json").demand()
    shutil.copy(saved.folder / "machine.json", output)
    tree = context.verb("tree", "topo", "explain=true").demand()
    told = context.verb("explained", "plan", "explain=true").demand()
    (output / "plan.txt").write_text(f"{tree.out}\n{told.out}\n{told.err}")
    planned = context.verb("plan", "plan", "format=json").demand()
    (output / "plan.json").write_text(planned.out)
    ranks = json.loads(planned.out)["ranks"]
    again = context.verb(
        "snapshot",
        "plan",
        f"machine.snapshot={output / 'machine.json'}",
        f"nproc_per_node={len(ranks)}",
        "format=json",
    ).demand()
    record.check(
        "the snapshot's plan is the machine's", place(json.loads(again.out)["ranks"]) == place(ranks)
    )
    gpus = [rank["gpu"] for rank in ranks]
    if context.cpu:
        record.check("no rank has a GPU", not any(gpus), str(gpus))
    else:
        record.check("each rank has a GPU", all(gpus), str(gpus))
        count = count_gpus()
        record.check(
            "there is a rank for each GPU that torch sees", len(gpus) == count > 0, f"{len(gpus)}, {count}"
        )
    for rank in ranks:
        gpu = rank["gpu"] or {}
        record.row(
            "Ranks as planned",
            rank=rank["local_rank"],
            gpu=gpu.get("uuid"),
            pci=gpu.get("pci"),
            cpus=rank["cpus"],
            worker_cpus=rank["worker_cpus"],
            memory=rank["memory"]["policy"] + " " + rank["memory"]["nodes"],
            workers=rank["num_workers"],
            threads=rank["omp_num_threads"],
            nic=rank["nic"],
        )


def place(ranks: list[dict[str, object]]) -> list[list[object]]:
    """What of a plan is the machine's doing."""
    return [[rank[name] for name in ("gpu", "cpus", "worker_cpus", "memory", "nic")] for rank in ranks]


def count_gpus() -> int:
    """GPUs that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def keep_doctor(context: Context) -> None:
    """Keep the findings; that there are some is no failure."""
    done = context.verb("doctor", "doctor", "format=json")
    (context.output / "doctor.json").write_text(done.out)
    context.record.check("doctor ends with 0 or 1", done.code in (0, 1), f"{done.code}: {done.err.strip()}")
    for finding in json.loads(done.out)["findings"]:
        if finding["level"] in ("warning", "error"):
            context.record.row("Doctor", level=finding["level"], found=finding["what"])


def time_host_name(context: Context) -> None:
    """Note how long it takes to look up the host's own name, which every start of torchrun does."""
    began = time.monotonic()
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        address = str(error)
    context.record.row(
        "Host name", name=socket.gethostname(), address=address, seconds=time.monotonic() - began
    )


def show_files() -> None:
    """Print the machine's files, and what nvidia-smi says, where there are any."""
    for pattern in LOOKED_AT:
        for path in sorted(Path("/").glob(pattern.lstrip("/"))):
            print(f"{path}: {read_start(path)}")
    for command in SMI if shutil.which("nvidia-smi") else ():
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        print(f"=== {' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def read_start(path: Path) -> str:
    """The first lines of a regular file; else what it is."""
    if path.is_symlink():
        return f"-> {path.readlink()}"
    if not path.is_file():
        return "a directory" if path.is_dir() else "a device"
    try:
        with path.open(errors="replace") as file:
            return file.read(2000).strip()
    except OSError as error:
        return str(error)
