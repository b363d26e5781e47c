"""The user's variables against those that the plan decides."""

from collections.abc import Mapping, Sequence

from launcher.plan.allocator_text import NAMES
from launcher.plan.rules import BINDERS
from launcher.protocol import LAUNCH_GC, LAUNCH_LOADER_DEFAULT, LAUNCH_NIC, LAUNCH_NUM_WORKERS

VariablesAndNotes = tuple[Mapping[str, str], Sequence[str]]
"""What one concern of a rank comes to: variables by name, and notes for people."""
COUNTS = {
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
    "OPENBLAS_NUM_THREADS": 1,
    "NUMEXPR_NUM_THREADS": 1,
    "TORCHINDUCTOR_COMPILE_THREADS": 0,
    LAUNCH_NUM_WORKERS: 0,
}
"""Variables that hold a number, and the least that it may be."""
MERGED = (*NAMES, "LD_PRELOAD")
"""Variables whose settings the plan joins with its own."""
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables that can show a rank its GPU, alone or with others."""
EMPTY = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that hide all GPUs where they are empty."""
HONOURED = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *COUNTS,
    *("NUMEXPR_MAX_THREADS", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *BINDERS,
    *(LAUNCH_LOADER_DEFAULT, LAUNCH_GC, LAUNCH_NIC, "NCCL_IB_HCA"),
    *MERGED,
)
"""Variables of the user's that the plan depends on; one that the user has set wins."""


def read_variable_count(environ: Mapping[str, str], name: str, least: int) -> int | None:
    """The number in a variable, the first of a list (`OMP_NUM_THREADS=8,4`); None where there is none."""
    text = environ.get(name, "").split(",")[0].strip()
    # Longer numbers are no count of anything here, and int() refuses some thousands of digits.
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    return number if number >= least else None


def find_kept(environ: Mapping[str, str], decided: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the user's variables that stay; `decided` are those that show GPUs."""
    return tuple(name for name in HONOURED if name in environ and stays(environ, name, decided))


def stays(environ: Mapping[str, str], name: str, decided: Mapping[str, str]) -> bool:
    """Whether a variable stays as the user has it: not where it holds a number that no program could read.

    An empty value is as good as none but where it hides GPUs.
    """
    if name in COUNTS:
        return read_variable_count(environ, name, COUNTS[name]) is not None
    if name in BINDERS or name in MERGED or (name in DEVICES and name in decided):
        return False
    return bool(environ[name]) or name in EMPTY
