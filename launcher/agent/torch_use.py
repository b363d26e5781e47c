"""Does a Python program use torch? Judged from its text in milliseconds, nothing of it is run.

A wrong answer costs time and nothing else: ranks that are not forked are started as ever.
"""

import ast
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.agent.python_program import ExecNeededError, PythonProgram, find_python_program
from launcher.files import read_file

TORCH = "torch"
MOST_FILES = 60
MOST_BYTES = 1 << 20
"""Of a file."""
MOST_SECONDS = 0.03
"""Until the answer is that it may."""
OBVIOUS = re.compile(rb"^[ \t]*(?:import|from)[ \t]+torch\b", re.MULTILINE)
"""A line that imports torch, found without parsing the file."""
DYNAMIC = (
    *("import_module", "__import__", "exec", "eval"),
    *("run_path", "run_module", "load_module", "exec_module"),
)
"""Functions that may import anything."""
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


@dataclass(slots=True)
class ImportSearch:
    """Goes through a program's files, the main one first, until one may import torch."""

    folders: tuple[str, ...]
    """Where the program's own modules are looked for."""
    deadline: float
    """Monotonic time."""
    waiting: list[str] = field(default_factory=list)
    """Files that have still to be read."""
    seen: set[str] = field(default_factory=set)
    """Files, and names of modules."""

    def run(self) -> bool:
        """Tell whether a file may import torch; it is taken for true if that takes too long to find out."""
        while self.waiting:
            path = self.waiting.pop()
            if len(self.seen) > MOST_FILES or time.monotonic() > self.deadline:
                return True
            if path not in self.seen:
                self.seen.add(path)
                if self.search_file(path):
                    return True
        return False

    def search_file(self, path: str) -> bool:
        """Tell whether a file may import torch by itself; the program's own modules in it are read later."""
        try:
            source = read_file(path, MOST_BYTES, follow=True)
            if OBVIOUS.search(source):
                return True
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            return True
        return any(map(self.judge_name, list_imported(tree, self.name_package(path))))

    def name_package(self, path: str) -> str:
        """Return the dotted name of the package that a file is in, for its relative imports."""
        folder = os.path.dirname(path)
        for root in self.folders:
            if folder.startswith(f"{root}/"):
                return folder[len(root) + 1 :].replace("/", ".")
        return ""

    def judge_name(self, name: str) -> bool:
        """Tell whether a module may import torch; one of the program's own is read later."""
        top = name.partition(".")[0]
        if name in self.seen or top in sys.stdlib_module_names or top in WITHOUT_TORCH:
            return False
        self.seen.add(name)
        found = list(self.find_own(name))
        self.waiting += found
        return not found

    def find_own(self, name: str) -> Iterator[str]:
        """Give the program's own files that are run if a module is imported, its packages' among them."""
        parts = name.split(".")
        for root in self.folders:
            base = os.path.join(root, parts[0])
            if not os.path.isdir(base) and not os.path.isfile(f"{base}.py"):
                continue
            for size in range(1, len(parts) + 1):
                inner = os.path.join(root, *parts[:size])
                for path in (f"{inner}/__init__.py", f"{inner}.py"):
                    if os.path.isfile(path):
                        yield path
            return


def list_imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Give the dotted names of what a file imports, anywhere in it; `torch` if it may import anything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" if module else alias.name for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in DYNAMIC and not (name in ("eval", "exec") and isinstance(called, ast.Attribute)):
                yield TORCH


def uses_torch(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Tell whether a program's argv, run in the working directory, is a Python program that may use torch."""
    try:
        return may_program_use_torch(find_python_program(list(argv), dict(environ)), environ)
    except ExecNeededError:
        return False


def is_without_torch(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Tell whether an argv is a Python program without torch; of a shell script nobody knows what it runs."""
    try:
        return not may_program_use_torch(find_python_program(list(argv), dict(environ)), environ)
    except ExecNeededError:
        return False


def may_program_use_torch(program: PythonProgram, environ: Mapping[str, str]) -> bool:
    """Tell whether a program that was found in an argv may use torch."""
    if program.kind == "code":
        return TORCH in program.name
    script = ("-m", program.name) if program.kind == "module" else (program.name,)
    return may_use_torch(script, os.getcwd(), environ)


def may_use_torch(script: Sequence[str], directory: str, environ: Mapping[str, str]) -> bool:
    """Tell whether a Python program may import torch, from what stands after the interpreter.

    That is a script or a folder, or `-m` and a module. Modules are the program's own if they are found next
    to the script, in the working directory with `-m`, or on PYTHONPATH. An installed package may import torch
    unless it is known not to.
    """
    own = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    deadline = time.monotonic() + MOST_SECONDS
    if script[:1] in (["-m"], ("-m",)):
        search = ImportSearch((directory, *own), deadline)
        names = [*script[1:2], *(f"{name}.__main__" for name in script[1:2])]
        return any(map(search.judge_name, names)) or search.run()
    path = os.path.join(directory, *script[:1])
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    return ImportSearch((os.path.dirname(path), *own), deadline, [path]).run()
