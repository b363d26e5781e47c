"""What a configuration asks of a node: the planner's Request, and the snapshot that stands for the node.

A process of a SLURM job comes here before its agent starts, so imports count.
"""

from collections.abc import Mapping

from launcher.config.settings import Settings
from launcher.errors import UsageError
from launcher.files import LARGEST, read_input
from launcher.plan.model import MAX_RANKS, Machine, Request, parse_machine
from launcher.plan.variables import HONOURED, VISIBLE_DEVICES
from launcher.protocol import LAUNCH_NIC, find_user_set
from launcher.runs.secrets import mask_variables

DEVICE_VARIABLES = (*VISIBLE_DEVICES, LAUNCH_NIC, "NCCL_IB_HCA")
"""Variables that name devices of this machine, which a snapshot does not have."""
LIBRARY_PREFIXES = (
    *("CUDA_", "GLOO_", "GOMP_", "HSA_", "KMP_", "MALLOC_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PYTORCH_"),
    *("TORCH_", "TORCHINDUCTOR_", "TRITON_", "UCX_"),
)
"""Beginnings of the variables that set how PyTorch and the libraries below it behave."""
LOCATION_SUFFIXES = ("_VERSION", "_HOME", "_ROOT", "_ARCH_LIST", "_PATH")
"""Endings of the variables by which images and modules give the paths of libraries."""


def make_request(
    config: Settings, environ: Mapping[str, str], machine: Machine | None = None, caches: str = ""
) -> Request:
    """Return what a configuration asks of a node; raises UsageError.

    `environ` is the user's environment with `env.*` over it. `machine` is the node, None if it is not known
    yet. `caches` is a folder on the node for the compilers' caches, if they are not to have their own.
    """
    if config.machine.snapshot:
        environ = {k: v for k, v in environ.items() if k not in DEVICE_VARIABLES or k in config.env}
    return Request(
        nproc_per_node=parse_nproc(config.nproc_per_node, len(machine.allowed_cpus) if machine else 1),
        devices=config.devices,
        binding=config.binding,
        dataloader=config.dataloader,
        gc=config.gc,
        allocator=config.allocator,
        caches=caches,
        environ=find_user_set(environ, HONOURED) | find_library_variables(environ),
        configured=mask_variables(config.env),
    )


def parse_nproc(text: object, cpus: int) -> int | None:
    """Read `nproc_per_node`, also torchrun's words for it; None is `auto`. Raises UsageError."""
    if text in ("auto", "gpu"):
        return None
    if text == "cpu":
        return cpus
    try:
        number = int(str(text))
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_RANKS:
        shown = "null" if text is None else text
        raise UsageError(
            f"nproc_per_node={shown}: give a number of at least 1 and at most {MAX_RANKS}, or auto"
        )
    return number


def find_library_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of PyTorch and its libraries that are set beside HONOURED, secrets masked."""
    names = (
        name
        for name in sorted(environ)
        if name.startswith(LIBRARY_PREFIXES) and not name.endswith(LOCATION_SUFFIXES)
    )
    return mask_variables({name: environ[name] for name in names if name not in HONOURED})


def load_snapshot(path: str) -> Machine:
    """Read a machine from what `launch topo save=FILE` or `launch plan format=json` wrote.

    Raises UsageError for a file that cannot be read, or that holds something else.
    """
    try:
        data = read_input(path, LARGEST)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"machine.snapshot={path} cannot be read ({getattr(error, 'strerror', '') or error}): "
            "give a path from here, or a file in conf/machine/"
        ) from None
    try:
        return parse_machine(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"machine.snapshot={path}: not a machine snapshot (no UTF-8 text, {error.reason} at byte"
            f" {error.start}): make one with `launch topo save=FILE`"
        ) from None
    except UsageError as error:
        raise UsageError(f"machine.snapshot={path}: {error}") from None
