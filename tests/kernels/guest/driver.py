"""What an NVIDIA driver would add to this kernel. Of all that a guest shows, this alone is made up.

The PCI devices behind it are QEMU's, and their addresses, paths, NUMA nodes and local CPUs the kernel's.
"""

import os
import stat
from pathlib import Path

from .syscalls import mount

PCI = Path("/sys/bus/pci/devices")
VIRTIO_GPU = ("0x1af4", "0x1050")
NVIDIA_MAJOR = 195


def pretend_driver() -> None:
    """Add /proc/driver/nvidia and /dev/nvidiaN for the graphics devices that the kernel found."""
    found = sorted(device.name for device in PCI.iterdir() if is_gpu(device))
    if not found:
        return
    mount("tmpfs", "/proc/driver")
    for minor, address in enumerate(found):
        folder = Path("/proc/driver/nvidia/gpus", address)
        folder.mkdir(parents=True)
        (folder / "information").write_text(describe(minor, address))
        os.mknod(f"/dev/nvidia{minor}", 0o666 | stat.S_IFCHR, os.makedev(NVIDIA_MAJOR, minor))
    os.mknod("/dev/nvidiactl", 0o666 | stat.S_IFCHR, os.makedev(NVIDIA_MAJOR, 255))


def is_gpu(device: Path) -> bool:
    """Whether a PCI device is one of QEMU's graphics devices."""
    return ((device / "vendor").read_text().strip(), (device / "device").read_text().strip()) == VIRTIO_GPU


def describe(minor: int, address: str) -> str:
    """The driver's `information` file of a GPU."""
    return (
        f"Model: \t\t QEMU virtio-gpu\nIRQ:   \t\t {100 + minor}\n"
        f"GPU UUID: \t GPU-{minor:08x}-0000-0000-0000-000000000000\n"
        f"Bus Type: \t PCIe\nBus Location: \t {address}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
    )
