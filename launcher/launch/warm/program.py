"""Which ranks can be forked from a process with torch: their command line, variables, and the program's text.

In a rank that is forked from a process with torch, the import of torch is over at the program's first line.
If a program does something before it that has an effect on the import, its ranks are executed.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launcher.files import read_file
from launcher.rank.hook import FOLDER, add_python, find_interpreter, locate_command, split_options

PLAIN_OPTIONS = "bBdOPqsu"
"""Options of python(1) without a value that a forked rank has from the process that it is forked from."""
MAY_DIFFER = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|TORCH_(ELASTIC_SHUTDOWN_TIMEOUT|DISABLE_SHARE_RDZV_TCP_STORE)|(TORCH_)?NCCL_\w+|LAUNCH_(?!FIT$)\w+"
    r"|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|TORCHINDUCTOR_(CACHE_DIR|COMPILE_THREADS)"
    r"|TRITON_CACHE_DIR|(OMP|MKL|OPENBLAS|GOTO|NUMEXPR)_(NUM|MAX)_THREADS|PYTORCH_((CUDA|HIP)_)?ALLOC_CONF)"
)
"""Variables that may differ between the process with torch and a rank: those of a rank, and of its plan.

They are read after the import of torch, by the functions that they change, or set again. This was seen by
tracing getenv(3) and `os.environ` during the import (torch 2.13, CPU).
"""
MOST_BYTES = 1 << 21
"""Of all files of a program together, which are looked through in a tenth of a second."""
WITHOUT_TORCH = (
    "PIL click cv2 dotenv fsspec h5py hydra jax jinja2 matplotlib mpi4py numba numpy omegaconf pandas polars"
    " psutil pyarrow pydantic pytest requests rich scipy sklearn submitit tensorboard tensorflow tqdm yaml"
)
"""Packages that do not import torch when they are imported. Any other that is installed may."""
STRING = rb"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
LITERALS = re.compile(rb"#[^\n]*|(\"\"\"|''')(?:\\.|(?!\1).)*\1|" + STRING, re.DOTALL)
"""A comment or a string; the group is there for one in triple quotes."""
IMPORT = re.compile(
    rb"(?:^|;)[ \t]*(?:from[ \t]+(?P<dots>\.*)(?P<module>[\w.]*)[ \t]*import[ \t]*"
    rb"(?P<names>\([^)]*\)|[^\n;]*)|import[ \t]+(?P<modules>[^\n;]*))",
    re.MULTILINE,
)
TORCH = re.compile(rb"^(?:[^\s:][^\n:]*;[ \t]*)?((?:import|from)[ \t]+torch\b)", re.MULTILINE)
"""At the program's own level: after a colon, it may be in a function's."""
ANY_MODULE = re.compile(rb"\bimport_module\b|(?<![.\w])exec\b|\brunpy\b")
READ_AT_IMPORT = (
    rb"A(?:CC_DEVICE|TEN)_|BLIS_|C10_|COMPILE_STROBELIGHT_|CUDA_MODULE_LOADING|CUDA_INJECTION64_PATH|DNNL_|FX_"
    rb"|GFORTRAN_|GOMP_|GOTO_|I_MPI_|INTEL_LIBITTNOTIFY|KINETO_|KMP_|MKL|MPI_LOCALNRANKS|NPY_|NUMPY_|NVPL_|OMP_"
    rb"|OMPI_COMM_WORLD_LOCAL_SIZE|ONEDNN_|OPENBLAS_|OPENSSL_|PYTORCH_|TORCH|TQDM_|VECLIB_"
)
"""Beginnings of variables that are read until `import torch` is over: by getenv(3), whose calls were traced
in torch 2.13 (CPU), or by Python code; tqdm looks through all variables for its own."""
_VARIABLE = rb"(?:['\"](?:" + READ_AT_IMPORT + rb")\w*['\"]|(?!\s*['\"]\w+['\"])[^\]\n]*?)"
"""One of these, or a name that does not stand there as a string."""
OBSTACLES = {
    "changes what imports find": rb"(?<!in )\bsys\s*\.\s*path\b(?!\s*(?:\.\s*(?:append|extend)\b|\+=))"
    rb"|(?<!in )\bsys\s*\.\s*modules\b(?!\s*(?:\[__name__\]|\.\s*(?:get|items)\b))"
    rb"|\bfrom\s+sys\s+import\b[^\n]*\b(?:path|modules|monitoring)\b|\bimport\s+sys\s+as\b"
    rb"|\b(?:meta_path|path_hooks|addsitedir|__import__)\b",
    "watches what runs": rb"\b(?:settrace|setprofile|addaudithook|sys\.monitoring)\b"
    rb"|^[ \t]*(?:import|from)[ \t]+(?:cProfile|coverage|hunter|kernprof|line_profiler|memory_profiler|memray"
    rb"|profile|pyinstrument|scalene|trace|tracemalloc|viztracer|yappi)\b",
    "runs other code": rb"(?<![.\w])exec\s*\(|\brunpy\b",
    "sets variables that the import of torch may read": rb"\benviron\s*\[\s*"
    + _VARIABLE
    + rb"\s*\]\s*\+?=(?!=)"
    rb"|(?:\benviron\s*\.\s*(?:setdefault|pop)|\b(?:putenv|unsetenv))\s*\(\s*"
    + _VARIABLE
    + rb"|\benviron\s*(?:\.\s*(?:update|clear|popitem|__\w+item__)\b|\|=)|\bdel\s+(?:os\.)?environ\b",
}
"""What a fork would be too late for, and the text that tells of it; some of it only looks so."""
OBSTACLE = re.compile(b"|".join(b"(%b)" % pattern for pattern in OBSTACLES.values()), re.MULTILINE)
"""Any of these, each a group."""


class ExecNeededError(Exception):
    """A rank of this program cannot be forked from a warm process; the text says why."""


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """A program that this interpreter runs."""

    command: tuple[str, ...]
    """The interpreter, its options, the program and its arguments."""
    first_argument: int
    """Where the program's own arguments begin in the command."""
    kind: str
    """`file` (a script, or a folder or zip file with `__main__.py`), `m` (a module) or `c` (code)."""
    name: str
    """The file's path, the module's name, or the code."""


def find_python_program(argv: Sequence[str], environ: Mapping[str, str]) -> PythonProgram:
    """Return what a rank's argv runs in this interpreter, relative to the working directory.

    Raises ExecNeededError if it is something else, or has options of the interpreter with which a forked rank
    would not be the same.
    """
    variables, python = dict(environ), sys.executable
    try:
        command = find_interpreter(add_python(list(argv)), variables)
    except OSError as error:
        raise ExecNeededError(f"{argv[0]} cannot be read ({error.strerror})") from None
    if not command:
        raise ExecNeededError(f"{argv[0]} is no Python program")
    path = locate_command(command[0], variables)
    # The folder tells the environment, and the file behind it the interpreter.
    folders = {os.path.dirname(os.path.abspath(found)) for found in (path, python)}
    if len(folders) > 1 or os.path.realpath(path) != os.path.realpath(python):
        raise ExecNeededError(f"{path} is another interpreter than {python}")
    options, index = split_options(command)
    for letter, value in options:
        if not (value if letter in "cmW" else letter in PLAIN_OPTIONS):
            shown = letter if letter.startswith("-") else f"-{letter}{value}"
            raise ExecNeededError(f"the interpreter has the option {shown}")
    kind, value = options[-1] if options else ("", "")
    if kind in ("c", "m"):
        return PythonProgram(tuple(command), index, kind, value)
    if index >= len(command) or command[index] == "-":
        raise ExecNeededError("the program comes from stdin")
    return PythonProgram(tuple(command), index + 1, "file", command[index])


def check_environment(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raise ExecNeededError unless a rank's variables (`after`) go with a process with torch that has others.

    Our folder on PYTHONPATH does not count.
    """
    for name in sorted({*before, *after}):
        values = [environ.get(name) for environ in (before, after)]
        if name == "PYTHONPATH":
            values = [(value or "").removeprefix(FOLDER).lstrip(os.pathsep) for value in values]
        if values[0] != values[1] and not MAY_DIFFER.fullmatch(name):
            raise ExecNeededError(f"{name} may have been read by the import of torch, and has another value")


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
    left: int = MOST_BYTES
    """Bytes that may still be read."""

    def read_file(self, path: str) -> None:
        """Look through a file, and the program's own files that it imports."""
        if path in self.seen:
            return
        self.seen.add(path)
        try:
            source = read_file(path, self.left, follow=True)
        except OSError:
            self.uses_torch = True
            self.obstacle = self.obstacle or "its files cannot be read, or are too large to look through"
            return
        self.left -= len(source)
        self.read_text(source, path)

    def read_text(self, source: bytes, path: str) -> None:
        """Look through a file's text: for obstacles, up to the import of torch."""
        source = LITERALS.sub(_drop_prose, source.replace(b"\\\n", b"  "))
        statements = re.sub(STRING, lambda string: b"_" * len(string[0]), source)
        found = TORCH.search(statements)
        end = found.start(1) if found and not self.to_the_end else len(source)
        for statement in IMPORT.finditer(statements):
            if self.uses_torch and statement.start() >= end:
                break
            self.follow(statement, path)
        self.uses_torch = self.uses_torch or bool(ANY_MODULE.search(source))
        found = OBSTACLE.search(source, 0, end)
        if found and found.lastindex and not self.obstacle:
            line = 1 + source.count(b"\n", 0, found.start())
            self.obstacle = f"{os.path.basename(path)}:{line} {[*OBSTACLES][found.lastindex - 1]}"

    def follow(self, statement: "re.Match[bytes]", path: str) -> None:
        """Look through the program's own modules that an import statement may import."""
        words = statement["modules"] or statement["names"] or b""
        prefix, roots = statement["module"] or b"", self.folders
        if statement["dots"]:
            above = [os.pardir] * (len(statement["dots"]) - 1)
            roots = (os.path.normpath(os.path.join(os.path.dirname(path), *above)),)
        for piece in words.strip(b"() \t\r\n").split(b","):
            name = piece.partition(b" as ")[0].split()[-1:]
            parts = b".".join(filter(None, [prefix, *name])).decode(errors="replace").split(".")
            tops = (os.path.join(root, parts[0]) for root in roots)
            top = next((top for top in tops if os.path.isdir(top) or os.path.isfile(f"{top}.py")), "")
            ours = parts[0] == "launcher" and "programs" not in parts  # what a program can ask of `launch`
            is_known = ours or parts[0] in sys.stdlib_module_names or parts[0] in WITHOUT_TORCH.split()
            if parts[0] == "torch" or not (top or is_known or statement["dots"]):
                self.uses_torch = True
            for size in range(len(parts)) if top else ():
                inner = os.path.join(top, *parts[1 : size + 1])
                for file in filter(os.path.isfile, (f"{inner}/__init__.py", f"{inner}.py")):
                    self.read_file(file)


def read_program(
    argv: Sequence[str], environ: Mapping[str, str], *, to_the_end: bool = False
) -> ProgramText | None:
    """Look through the files of the Python program that an argv runs in the working directory.

    None if it is something else. An installed package may import torch unless it is known not to. Modules are
    the program's own if they are found next to the script, in the working directory with `-m`, or on
    PYTHONPATH. With `to_the_end`, what comes after the import of torch counts, too.
    """
    try:
        program = find_python_program(argv, environ)
    except ExecNeededError:
        return None
    folders = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if program.kind == "file":
        path = os.path.join(program.name, "__main__.py") if os.path.isdir(program.name) else program.name
        text = ProgramText((os.path.dirname(os.path.realpath(path)), *folders), to_the_end)
        text.read_file(path)
        return text
    text = ProgramText((os.getcwd(), *folders), to_the_end)
    code = program.name if program.kind == "c" else f"import {program.name}, {program.name}.__main__"
    text.read_text(code.encode(errors="replace"), f"-{program.kind}")
    return text


def _drop_prose(found: "re.Match[bytes]") -> bytes:
    """Keep a string, but no comment, and of a text in triple quotes the number of its lines alone."""
    if found[1]:
        return b'""' + b"\n" * found[0].count(b"\n")
    return b"" if found[0].startswith(b"#") else found[0]
