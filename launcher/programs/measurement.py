"""What `launcher.programs.node_work` prints of a node's devices: each of these is a line of JSON.

The launcher reads them with the same types, so nothing here imports torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The torch that there is: the first line."""

    torch: str = ""
    """Its version, with the local part: `2.8.0+cu128`."""
    torch_cuda: str = ""
    """CUDA version that it was built for; empty for a CPU build."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured piece of work."""

    measure: str
    """`matmul` (TFLOPS), `copy_to`, `copy_from`, `memory`, `all_reduce`, `pair` (all GB/s)."""
    where: str
    """`GPU 3`, `CPU` (all of them together), `node`, or `n1-n2` for a pair."""
    value: float | None = None
    """None if it failed; see `problem`."""
    unit: str = ""
    checksum: str = ""
    """Of the result's bits, for work that gives the same on equal devices; empty if it does not."""
    problem: str = ""
    """How it failed, which speaks against the device."""
    reason: str = ""
    """Why it was not measured, if that says nothing of the device: no time was left."""
    device: str = ""
    """Kind of device, as `NVIDIA H100 80GB HBM3`: only the same kind is compared."""
    uuid: str = ""
    """Of a GPU: torch numbers those that are visible."""
