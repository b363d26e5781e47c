"""What the text of a Python program tells before anything of it runs: does it use torch, can it be forked?

In a rank that is forked from a process with torch, the import of torch is over at the program's first line.
If a program does something before it that has an effect on the import, its ranks are executed.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.files import read_file
from launcher.launch.warm.python_program import ExecNeededError, find_python_program

MOST_FILES = 60
MOST_BYTES = 1 << 21
"""Of all files together, which are looked through in a tenth of a second."""
TOO_MUCH = "it has more files, or larger ones, than can be looked through before torch"
WITHOUT_TORCH = frozenset(
    (
        *("PIL", "absl", "aiohttp", "attr", "attrs", "boto3", "botocore", "certifi", "charset_normalizer"),
        *("click", "cloudpickle", "colorama", "cupy", "cv2", "cycler", "dateutil", "dill", "dotenv", "fire"),
        *("flask", "fsspec", "google", "grpc", "h5py", "httpx", "hydra", "idna", "jinja2", "joblib"),
        *("jsonschema", "kiwisolver", "loguru", "lxml", "lz4", "markupsafe", "matplotlib", "mpi4py"),
        *("msgpack", "networkx", "nltk", "numba", "numpy", "omegaconf", "orjson", "packaging", "pandas"),
        *("pkg_resources", "plotly", "polars", "prometheus_client", "psutil", "pyarrow", "pydantic"),
        *("pydantic_core", "pygments", "pynvml", "pyparsing", "pytest", "pytz", "redis", "regex"),
        *("requests", "rich", "ruamel", "s3fs", "scipy", "seaborn", "setuptools", "simplejson", "six"),
        *("sklearn", "sqlalchemy", "submitit", "sympy", "tabulate", "tensorboard", "termcolor", "toml"),
        *("tomli", "tqdm", "typer", "typing_extensions", "ujson", "urllib3", "wandb", "xxhash", "yaml"),
        *("zmq", "zstandard"),
    )
)
"""Packages that do not import torch when they are imported. Any other that is installed may."""
LITERALS = re.compile(
    rb"#[^\n]*|(\"\"\"|''')(?:\\.|(?!\1).)*\1|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL
)
"""A comment or a string; the group is there for one in triple quotes."""
IMPORT = re.compile(
    rb"^(?P<indent>[ \t]*)"
    rb"(?:from[ \t]+(?P<dots>\.*)(?P<module>[\w.]*)[ \t]*import[ \t]*(?P<names>\([^)]*\)|[^\n]*)"
    rb"|import[ \t]+(?P<modules>[^\n]*))",
    re.MULTILINE,
)
ANY_IMPORT = re.compile(
    rb"(?<![.\w])(?:exec|eval)\s*\(|\b(?:import_module|__import__|run_path|run_module|(?:load|exec)_module)\b"
)
"""Functions that may import anything."""
READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "ACC_DEVICE_"),  # libgomp, libomp: constructors
    *("MKL_", "I_MPI_", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),  # MKL inside libtorch_cpu
    *("ONEDNN_", "DNNL_", "MKLDNN_", "INTEL_LIBITTNOTIFY"),  # oneDNN inside libtorch_cpu
    *("OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "GFORTRAN_", "NPY_", "NUMPY_", "NVPL_"),  # NumPy
    *("TORCH", "PYTORCH_", "C10_", "ATEN_", "KINETO_", "FX_", "COMPILE_STROBELIGHT_"),  # torch
    *("OPENSSL_", "TQDM_", "CUDA_MODULE_LOADING", "CUDA_INJECTION64_PATH"),
)
"""Beginnings of variables that are read until `import torch` is over: by getenv(3), whose calls were traced
in torch 2.13 (CPU), or by Python code; tqdm looks through all variables for its own."""
SET_VARIABLE = re.compile(
    rb"\benviron\s*(?:\[\s*['\"](\w+)['\"]\s*\]\s*\+?=(?!=)|\.\s*(?:setdefault|pop)\s*\(\s*['\"](\w+)['\"])"
    rb"|\b(?:putenv|unsetenv)\s*\(\s*['\"](\w+)['\"]"
)
"""A variable is set or removed whose name stands beside that."""
CHANGES = {
    "changes sys.path": rb"(?<!in )\bsys\s*\.\s*path\b(?!\s*(?:\.\s*(?:append|extend)\b|\+=))",
    "changes sys.modules": rb"(?<!in )\bsys\s*\.\s*modules\b(?!\s*(?:\[__name__\]|\.\s*(?:get|items)\b))",
    "changes what sys has": rb"\bfrom\s+sys\s+import\b[^\n]*\b(?:path|modules|monitoring)\b"
    rb"|\bimport\s+sys\s+as\b",
    "changes how modules are imported": rb"\b(?:meta_path|path_hooks|addsitedir|__import__)\b",
    "watches what runs": rb"\b(?:settrace|setprofile|addaudithook|sys\.monitoring)\b"
    rb"|^[ \t]*(?:import|from)[ \t]+(?:cProfile|coverage|hunter|kernprof|line_profiler|memory_profiler|memray"
    rb"|profile|pyinstrument|scalene|trace|tracemalloc|viztracer|yappi)\b",
    "runs other code": rb"(?<![.\w])exec\s*\(|\brunpy\b",
    "sets variables": rb"\benviron\s*(?:\[\s*(?!['\"]\w+['\"]\s*\])[^\]]*\]\s*\+?=(?!=)"
    rb"|\.\s*(?:setdefault|pop)\s*\((?!\s*['\"])|\.\s*(?:update|clear|popitem|__\w+item__)\b|\|=)|\bdel\s+(?:os\.)?environ\b"
    rb"|\b(?:putenv|unsetenv)\b(?!\s*\(\s*['\"])",
}
"""What a fork would be too late for, and the text that tells of it; some of it only looks so."""
CHANGE = {name: re.compile(pattern, re.MULTILINE) for name, pattern in CHANGES.items()}


@dataclass(slots=True)
class ProgramText:
    """What was found in a program's files, as far as they are run before the import of torch."""

    folders: tuple[str, ...]
    """Where the program's own modules are looked for."""
    to_the_end: bool
    """More than torch is imported beforehand: what comes after the import of torch counts, too."""
    uses_torch: bool = False
    """It may import torch."""
    obstacle: str = ""
    """Why its ranks cannot be forked; empty if nothing was found."""
    seen: set[str] = field(default_factory=set)
    """Files that were read."""
    size: int = 0
    """Bytes that were read."""

    def read_file(self, path: str) -> bool:
        """Look through a file; tell whether torch is imported for certain once it has run."""
        if path in self.seen:
            return False
        self.seen.add(path)
        try:
            source = read_file(path, MOST_BYTES, follow=True)
            self.size += len(source)
        except OSError:  # too large, or not there
            self.size += MOST_BYTES if os.path.exists(path) else 0
            self.uses_torch = True
            source = b""
        if len(self.seen) > MOST_FILES or self.size > MOST_BYTES or b"\0" in source:
            reason = f"{os.path.basename(path)} is no text" if b"\0" in source else TOO_MUCH
            self.uses_torch, self.obstacle = True, self.obstacle or reason
            return False
        return self.read_text(source, path)

    def read_text(self, source: bytes, path: str) -> bool:
        """Look through a file's text, in the order of its lines, up to the import of torch."""
        source = LITERALS.sub(_drop_prose, source.replace(b"\\\n", b"  "))
        end, is_imported = len(source), False
        for found in IMPORT.finditer(source):
            certain = False
            for name in self.list_names(found, path):
                certain = self.judge_import(name) or certain
            if certain and not found["indent"] and not self.to_the_end:
                end, is_imported = found.start(), True
                break
        self.uses_torch = self.uses_torch or ANY_IMPORT.search(source) is not None
        self.obstacle = self.obstacle or find_change(source[:end], os.path.basename(path))
        return is_imported

    def judge_import(self, name: str) -> bool:
        """Take a module that is imported; tell whether torch is imported for certain after that."""
        top = name.partition(".")[0]
        if top == "torch":
            self.uses_torch = True
            return True
        if top in sys.stdlib_module_names or top in WITHOUT_TORCH:
            return False
        files = list(self.find_own(name))
        self.uses_torch = self.uses_torch or not files
        certain = [self.read_file(path) for path in files]  # all of them, to the last
        return any(certain)

    def list_names(self, found: re.Match[bytes], path: str) -> Iterator[str]:
        """Give the dotted names of modules that an import statement may import."""
        if found["modules"] is not None:
            for piece in re.split(r"[,;]", found["modules"].decode(errors="replace")):
                yield from piece.partition(" as ")[0].split()[-1:]
            return
        module = found["module"].decode(errors="replace")
        if found["dots"]:
            package = self.name_package(path).split(".")
            above = package[: len(package) + 1 - len(found["dots"])]
            module = ".".join(filter(None, [*above, module]))
        for piece in re.split(r"[,;]", found["names"].decode(errors="replace").strip("() \t\r\n")):
            yield ".".join(filter(None, [module, *piece.partition(" as ")[0].split()[-1:]]))

    def name_package(self, path: str) -> str:
        """Return the dotted name of the package that a file is in, for its relative imports."""
        folder = os.path.dirname(path)
        inside = (folder[len(root) + 1 :] for root in self.folders if folder.startswith(f"{root}/"))
        return next(inside, "").replace("/", ".")

    def find_own(self, name: str) -> Iterator[str]:
        """Give the program's own files that are run if a module is imported, its packages' among them."""
        parts = name.split(".")
        for root in self.folders:
            base = os.path.join(root, parts[0])
            if not os.path.isdir(base) and not os.path.isfile(f"{base}.py"):
                continue
            for size in range(1, len(parts) + 1):
                inner = os.path.join(root, *parts[:size])
                yield from filter(os.path.isfile, (f"{inner}/__init__.py", f"{inner}.py"))
            return


def read_program(
    argv: Sequence[str], environ: Mapping[str, str], *, to_the_end: bool = False
) -> ProgramText | None:
    """Look through the files of the Python program that an argv runs in the working directory.

    None if it is something else. An installed package may import torch unless it is known not to. Modules are
    the program's own if they are found next to the script, in the working directory with `-m`, or on
    PYTHONPATH. With `to_the_end`, what comes after the import of torch counts, too.
    """
    try:
        program = find_python_program(list(argv), dict(environ))
    except ExecNeededError:
        return None
    folders = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if program.kind != "file":
        text = ProgramText((os.getcwd(), *folders), to_the_end)
        if program.kind == "code":
            text.read_text(program.name.encode(errors="replace"), "-c")
        else:
            text.read_text(f"import {program.name}, {program.name}.__main__".encode(errors="replace"), "-m")
        return text
    path = os.path.join(program.name, "__main__.py") if os.path.isdir(program.name) else program.name
    text = ProgramText((os.path.dirname(os.path.realpath(path)), *folders), to_the_end)
    text.read_file(path)
    return text


def find_change(source: bytes, name: str) -> str:
    """Say where a text does what a fork would be too late for; empty if it does nothing of that."""
    found = []
    for change, pattern in CHANGE.items():
        found += [(place.start(), change) for place in pattern.finditer(source)]
    for place in SET_VARIABLE.finditer(source):
        variable = next(filter(None, place.groups())).decode(errors="replace")
        if variable.startswith(READ_AT_IMPORT):
            found.append((place.start(), f"sets {variable}, which is read by the import of torch"))
    if not found:
        return ""
    begin, change = min(found)
    line = 1 + source.count(b"\n", 0, begin)
    return f"{name}:{line} {change}"


def _drop_prose(found: re.Match[bytes]) -> bytes:
    """Keep a string, but no comment, and of a text in triple quotes the number of its lines alone."""
    if found[1]:
        return b'""' + b"\n" * found[0].count(b"\n")
    return b"" if found[0].startswith(b"#") else found[0]
