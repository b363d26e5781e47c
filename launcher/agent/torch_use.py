"""Does a Python program use torch, and could its ranks be forked? Judged from its text, nothing of it is run.

Does it change how modules are imported, or watch imports, before it imports torch? A fork would be too late.
"""

import ast
import errno
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
MOST_SECONDS_OF_CHANGES = 0.5
"""Until the ranks are executed instead: the start waits for the answer, up to twice."""
MOST_PARSED = 1 << 18
"""Bytes of a file, a third of a second."""
TOO_MUCH = "it has more files, or larger ones, than can be looked through before torch"
OBVIOUS = re.compile(rb"^[ \t]*(?:import|from)[ \t]+torch\b", re.MULTILINE)
"""A line that imports torch, found without parsing the file."""
IMPORT_LINE = re.compile(rb"^(?:import|from)[ \t]+torch\b", re.MULTILINE)
"""One that is no part of another statement."""
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


TRACERS = frozenset(
    (
        *("cProfile", "coverage", "hunter", "kernprof", "line_profiler", "memory_profiler", "memray"),
        *("profile", "pyinstrument", "scalene", "trace", "tracemalloc", "viztracer", "yappi"),
    )
)
"""Modules that watch what runs, imports among it."""
SYS_CHANGES = {
    "path": ("insert", "remove", "pop", "clear", "reverse", "sort", "__setitem__", "__delitem__"),
    "modules": ("setdefault", "update", "pop", "popitem", "clear", "__setitem__", "__delitem__"),
}
"""Attributes of `sys`, and methods by which a program changes what an import finds first."""
SYS_HOOKS = frozenset(("meta_path", "path_hooks", "settrace", "setprofile", "monitoring", "addaudithook"))
SUSPECT = re.compile(
    rb"\b(?:path|modules|meta_path|path_hooks|settrace|setprofile|monitoring|addaudithook|addsitedir|__import__"
    rb"|runpy|exec|" + "|".join(sorted(TRACERS)).encode() + rb")\b"
)
"""A word without which a file has none of this."""


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


class ChangeSearch:
    """Looks, in the order of the lines, for what a fork would be too late for, up to the import of torch."""

    def __init__(self, folders: tuple[str, ...], deadline: float, *, to_the_end: bool) -> None:
        self.search = ImportSearch(folders, deadline)
        self.to_the_end = to_the_end
        """More than torch is imported beforehand: what comes after the import of torch counts, too."""
        self.seen: set[str] = set()

    def search_file(self, path: str) -> tuple[str, bool]:
        """Return what a file changes, empty if nothing, and whether torch is imported after its last line."""
        if path in self.seen:
            return "", False
        self.seen.add(path)
        if len(self.seen) > MOST_FILES or time.monotonic() > self.search.deadline:
            return TOO_MUCH, False
        try:
            source = read_file(path, MOST_BYTES, follow=True)
        except OSError as error:
            return TOO_MUCH if error.errno == errno.EFBIG else "", False
        return self.search_text(source, path)

    def search_text(self, source: bytes, path: str) -> tuple[str, bool]:
        """Search a file's text. What does not parse is not run either."""
        match = None if self.to_the_end else IMPORT_LINE.search(source)
        try:
            try:
                tree = parse_text(source[: match.start()] if match else source)
            except SyntaxError:  # the line stands in a text
                match, tree = None, parse_text(source)
        except OverflowError:
            return TOO_MUCH, False
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return "", False
        is_suspect = SUSPECT.search(source) is not None
        package = self.search.name_package(path)
        for statement in tree.body:
            for node in ast.walk(statement) if is_suspect else ():
                if change := name_change(node):
                    return f"{os.path.basename(path)}:{getattr(node, 'lineno', 1)} {change}", False
            is_plain = isinstance(statement, ast.Import | ast.ImportFrom)
            for name in list_imported(statement, package):
                if name.partition(".")[0] == TORCH and is_plain and not self.to_the_end:
                    return "", True
                for own in self.search.find_own(name):
                    change, is_over = self.search_file(own)
                    if change or (is_over and is_plain and not self.to_the_end):
                        return change, is_over
        return "", match is not None


def parse_text(source: bytes) -> ast.Module:
    """Parse a file's text; raises OverflowError if it is long, since parsing cannot be interrupted."""
    if len(source) > MOST_PARSED:
        raise OverflowError(len(source))
    return ast.parse(source)


def name_change(node: ast.AST) -> str:
    """Say what a node of a program does that a fork would be too late for; empty if nothing."""
    names, text = [], ""
    if isinstance(node, ast.Import):
        names = [alias.name.partition(".")[0] for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [str(node.module).partition(".")[0]]
        taken = {alias.name for alias in node.names}
        if names == ["sys"] and (found := taken & (SYS_HOOKS | SYS_CHANGES.keys())):
            return f"takes {min(found)} from sys"
    elif isinstance(node, ast.Attribute):
        text = name_dotted(node)
        if text.startswith("sys.") and node.attr in SYS_HOOKS:
            return f"uses {text}"
        if text in ("threading.settrace", "threading.setprofile", "site.addsitedir"):
            return f"uses {text}"
        owner, _, method = text.rpartition(".")
        if method in SYS_CHANGES.get(owner.removeprefix("sys."), ()) and owner.startswith("sys."):
            return f"changes {owner}"
        is_import = text in ("sys.path", "sys.modules") or node.attr == "__import__"
        if is_import and not isinstance(node.ctx, ast.Load):
            return f"replaces {text}"
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        text = name_dotted(node.value)
        own = isinstance(node.slice, ast.Name) and node.slice.id == "__name__"
        if text == "sys.path" or (text == "sys.modules" and not own):
            return f"changes {text}"
    elif isinstance(node, ast.Assign) and name_dotted(node.value) == "sys.path":
        return "gives sys.path another name"
    elif isinstance(node, ast.AugAssign):
        if isinstance(node.target, ast.Attribute) and name_dotted(node.target) == "sys.path":
            node.target.ctx = ast.Load()  # an entry at the end
    elif isinstance(node, ast.Call):
        text = name_dotted(node.func)
        return f"runs other code by {text}" if text in ("exec", "runpy.run_path", "runpy.run_module") else ""
    elif isinstance(node, ast.Constant) and node.value in ("__import__", "builtins.__import__"):
        return "names __import__"
    return next((f"imports {name}" for name in names if name in TRACERS), "")


def name_dotted(node: ast.AST) -> str:
    """Return `a.b.c` of an expression; empty if it is no such name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join(["sys" if node.id == "_sys" else node.id, *reversed(names)])


def find_import_change(argv: Sequence[str], environ: Mapping[str, str], *, to_the_end: bool = False) -> str:
    """Say why ranks of a program cannot be forked, from what its text does before it imports torch.

    Empty if nothing is found. With `to_the_end`, what comes after that counts, too.
    """
    try:
        program = find_python_program(list(argv), dict(environ))
    except ExecNeededError:
        return ""
    paths = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    deadline = time.monotonic() + MOST_SECONDS_OF_CHANGES
    if program.kind != "file":
        search = ChangeSearch((os.getcwd(), *paths), deadline, to_the_end=to_the_end)
        if program.kind == "code":
            return search.search_text(program.name.encode(errors="replace"), "-c")[0]
        if program.name.partition(".")[0] in TRACERS:
            return f"{program.name} watches the program"
        files = [*search.search.find_own(program.name), *search.search.find_own(f"{program.name}.__main__")]
        return next(filter(None, (search.search_file(path)[0] for path in files)), "")
    path = os.path.join(program.name, "__main__.py") if os.path.isdir(program.name) else program.name
    folder = os.path.dirname(os.path.realpath(path))
    return ChangeSearch((folder, *paths), deadline, to_the_end=to_the_end).search_file(path)[0]


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
