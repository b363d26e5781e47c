"""The initramfs: this interpreter with its library, the launcher as it is now, and the guest program."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict
from pathlib import Path

import launcher

from .shapes import Shape

LEFT_OUT = {"test", "site-packages", "dist-packages", "idlelib", "tkinter", "lib2to3", "ensurepip", "venv"}
LEFT_OUT |= {"pydoc_data", "distutils", "unittest", "asyncio", "sqlite3", "xml", "xmlrpc", "turtledemo"}
"""Folders of the standard library that nothing here imports: half of it, and memory in a guest."""
EXTENSIONS = {"_ctypes", "_struct", "_posixsubprocess", "_json", "_random", "_bisect", "_heapq", "_datetime"}
EXTENSIONS |= {
    "_opcode",
    "_socket",
    "array",
    "binascii",
    "fcntl",
    "math",
    "mmap",
    "resource",
    "select",
    "zlib",
}
"""Extension modules that are taken, where they are not built in: the others drag in many libraries."""
INIT = """\
#!{program} -IS
import sys
sys.path.insert(0, "/lab")
from guest.init import main
main()
"""


def pack_interpreter(target: Path) -> Path:
    """Archive the running interpreter under its own paths, with the libraries that it needs."""
    files = list_interpreter()
    parents = {parent for file in files for parent in file.parents}
    names = sorted(str(path)[1:] for path in files | parents if path != Path("/"))
    return write_cpio(target, Path("/"), names)


def list_interpreter() -> set[Path]:
    """Files of the running interpreter: program, modules, and the libraries behind them."""
    library = Path(sysconfig.get_path("stdlib"))
    suffixes = (".py", f".{sys.implementation.cache_tag}.pyc")
    files: set[Path] = set()
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        files.update(Path(folder, name) for name in names if name.endswith(suffixes))
    program = find_program()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    modules = [library / "lib-dynload" / f"{name}{suffix}" for name in EXTENSIONS]
    binaries = [program, *(module for module in modules if module.exists())]
    return files.union(binaries, *(list_libraries(binary) for binary in binaries))


def find_program() -> Path:
    """The interpreter itself, behind the links of a virtual environment."""
    return Path(sys.executable).resolve()


def list_libraries(binary: Path) -> set[Path]:
    """Shared libraries of a program or module, by ldd."""
    done = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False)
    return {Path(word) for word in done.stdout.split() if word.startswith("/")}


def write_cpio(target: Path, folder: Path, names: list[str]) -> Path:
    """Archive files of a folder as the kernel takes them; links are followed, and root owns everything."""
    with target.open("wb") as file:
        subprocess.run(
            ["cpio", "--quiet", "-o", "-L", "-H", "newc", "-R", "0:0"],
            cwd=folder,
            input="".join(f"{name}\n" for name in names).encode(),
            stdout=file,
            check=True,
        )
    return target


def pack_programs(target: Path, stage: Path) -> Path:
    """Archive the launcher and the guest program as they are now, so that all guests run the same."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(launcher.__file__).parent, stage / "lab/launcher", ignore=ignore)
    shutil.copytree(Path(__file__).parent / "guest", stage / "lab/guest", ignore=ignore)
    init = stage / "init"
    init.write_text(INIT.format(program=find_program()))
    init.chmod(0o755)
    return write_cpio(target, stage, list_names(stage))


def list_names(folder: Path) -> list[str]:
    """Names of everything below a folder, parents first."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def write_initramfs(shape: Shape, archives: tuple[Path, ...], folder: Path) -> Path:
    """Add a guest's orders to the archives; the kernel takes one after another."""
    orders = {"cgroup": shape.cgroup, "scenarios": [asdict(scenario) for scenario in shape.scenarios]}
    stage = folder / "stage"
    (stage / "lab").mkdir(parents=True)
    (stage / "lab/scenarios.json").write_text(json.dumps(orders))
    last = write_cpio(folder / "orders.cpio", stage, list_names(stage))
    whole = folder / "initramfs"
    with whole.open("wb") as file:
        for part in (*archives, last):
            file.write(part.read_bytes())
    return whole
