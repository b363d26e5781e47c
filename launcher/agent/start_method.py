"""Which variables keep a rank from being forked: those that were read before it, with another value."""

from collections.abc import Collection

from launcher.agent.python_program import ExecNeededError

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")
"""Numbers of threads, which are set again by the libraries' functions (`launcher.agent.warm_server`)."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Settings of PyTorch's allocator, which are set again."""
READ_AT_START = (
    *("PYTHON", "__PYVENV_LAUNCHER__", "HOME"),  # the interpreter and `site`
    *("LC_", "LANG", "TZ"),  # the C library, on behalf of the interpreter
    *("LD_", "GLIBC_TUNABLES", "MALLOC_", "MIMALLOC_", "TCMALLOC_"),  # the dynamic linker, malloc
)
"""Beginnings of variables that are read before a program's first line, also without torch."""
READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "ACC_DEVICE_"),  # libgomp, libomp: constructors
    *("MKL_", "I_MPI_", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),  # MKL inside libtorch_cpu
    *("ONEDNN_", "DNNL_", "MKLDNN_", "INTEL_LIBITTNOTIFY"),  # oneDNN inside libtorch_cpu
    *("OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "GFORTRAN_", "NPY_", "NUMPY_", "NVPL_"),  # NumPy
    *("TORCH_", "PYTORCH_", "C10_", "ATEN_", "KINETO_"),  # libc10, libtorch
    *("OPENSSL_", "TQDM_", "CUDA_MODULE_LOADING", "CUDA_INJECTION64_PATH"),
)
"""Beginnings of variables that are read in C until `import torch` is over: by getenv(3), whose calls were
traced in torch 2.13 (CPU) with an LD_PRELOAD library. What Python code reads is recorded; tqdm, which torch
imports, looks through all variables for its own."""
READ_LATER = (
    *("TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_", "TORCH_ELASTIC_", "PYTORCH_NVML_BASED_CUDA_CHECK"),
    *("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_CUDA_ARCH_LIST"),
)
"""Beginnings of those among them that are read by the function that they change."""


def list_changed_variables(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the names of variables that two environments have with another value, or one of them alone."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def is_read_by_imports(name: str, read: Collection[str]) -> bool:
    """Tell whether a variable has no effect any more once torch is imported, and cannot be applied later.

    `read` are the names that Python code has asked `os.environ` for during the imports.
    """
    if name in THREADS or name in ALLOCATOR:
        return False
    return name in read or (name.startswith(READ_AT_IMPORT) and not name.startswith(READ_LATER))


def check_environment(before: dict[str, str], after: dict[str, str], read: Collection[str]) -> None:
    """Raise ExecNeededError if a rank's environment has another value of what the warm process has read.

    `read` is as for `is_read_by_imports`. The hook is on neither PYTHONPATH.
    """
    for name in list_changed_variables(before, after):
        if is_read_by_imports(name, read):
            raise ExecNeededError(f"{name} is read by the import of torch, and the rank has another value")
        if name.startswith(READ_AT_START):
            raise ExecNeededError(
                f"{name} counts from the interpreter's start, and the rank has another value"
            )


def check_written(written: Collection[str], read: Collection[str]) -> None:
    """Raise ExecNeededError if a program sets a variable that it would set before its import of torch."""
    for name in sorted(written):
        if is_read_by_imports(name, read):
            raise ExecNeededError(f"the program sets {name}, which is read by the import of torch")
