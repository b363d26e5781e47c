"""What is read on a node before its ranks are planned: the machine, and the variables that count.

`launch-rank` comes here from every rank that has no plan at hand, so imports count; and a job's head, which
plans nothing, for names alone.
"""

from collections.abc import Mapping

from launcher.errors import UsageError
from launcher.files import LARGEST, read_input
from launcher.protocol import LAUNCH_NIC

TYPE_CHECKING = False  # `typing` costs 4 ms
if TYPE_CHECKING:
    from launcher.plan.model import Machine

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that choose and number the GPUs of this machine."""
DEVICE_NAMES = (*VISIBLE_DEVICES, LAUNCH_NIC, "NCCL_IB_HCA")
"""Variables that name devices of this machine, which a snapshot's has not."""
MOST_RANKS = 4096
"""Ranks on a node: several times the threads of the largest; a slip of the finger must not fill memory."""
FAMILIES = (
    *("CUDA_", "GLOO_", "GOMP_", "HSA_", "KMP_", "MALLOC_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PYTORCH_"),
    *("TORCH_", "TORCHINDUCTOR_", "TRITON_", "UCX_"),
)
"""Beginnings of the variables that set how PyTorch, and what is under it, behave."""
FACTS = ("_VERSION", "_HOME", "_ROOT", "_ARCH_LIST", "_PATH")
"""Endings of those by which images and modules say what is where."""


def read_machine(root: str, snapshot: str | None) -> "Machine":
    """Return the machine below `root`, or a snapshot's; raises UsageError or MachineError."""
    if snapshot is None:
        from launcher.probe.machine import probe

        return probe(root)
    if root != "/":
        raise UsageError(
            f"machine.snapshot={snapshot} and machine.root={root} are two machines: leave one of them out"
        )
    return load_snapshot(snapshot)


def load_snapshot(path: str) -> "Machine":
    """Read a machine from what `launch topo save=FILE` or `launch plan format=json` wrote.

    Raises UsageError for a file that cannot be read, or that holds something else.
    """
    from launcher.plan.snapshot import parse_machine

    try:
        data = read_input(path, LARGEST)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"machine.snapshot={path} cannot be read ({getattr(error, 'strerror', '') or error}): "
            "give a path from here, or a file in conf/machine/"
        ) from None
    try:
        return parse_machine(decode_text(data))
    except UsageError as error:
        raise UsageError(f"machine.snapshot={path}: {error}") from None


def decode_text(data: bytes) -> str:
    """Return a file's text; raises UsageError for what cannot be a snapshot's."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"no UTF-8 text, {error.reason} at byte {error.start}"
        raise UsageError(
            f"not a machine snapshot ({reason}): make one with `launch topo save=FILE`"
        ) from None


def honoured_environ(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that the plan depends on, as far as somebody has set them."""
    from launcher.plan.environment import HONOURED
    from launcher.protocol import find_chosen

    return tuple(find_chosen(environ, HONOURED).items())


def telling_environ(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return what is set of PyTorch's and its libraries' variables beside those, secrets masked."""
    from launcher.plan.environment import HONOURED
    from launcher.runs.secrets import mask_variables

    names = (name for name in sorted(environ) if name.startswith(FAMILIES) and not name.endswith(FACTS))
    return tuple(mask_variables({name: environ[name] for name in names if name not in HONOURED}).items())


def locate_malloc(word: str, environ: Mapping[str, str], root: str) -> str | None:
    """Return the path of the library for `allocator.host` on this node, empty where it has none.

    None for the system's malloc, and for another machine, whose files are not here.
    """
    if word == "system" or root != "/":
        return None
    from launcher.probe.malloc_library import find_malloc_library

    return find_malloc_library(word, environ)
