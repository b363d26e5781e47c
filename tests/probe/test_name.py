"""What the machine is called."""

from pathlib import Path

import pytest

from launcher.probe.machine import LONGEST, read_product_name
from launcher.probe.sysfs import Tree

from .machine_trees import link, put

DMI = "sys/devices/virtual/dmi/id"
MODEL = "sys/firmware/devicetree/base/model"


def read(root: Path, product: str | bytes | None, model: bytes | None = None) -> str:
    link(root, "sys/class/dmi/id", DMI)
    for path, content in ((f"{DMI}/product_name", product), (MODEL, model)):
        if content is not None:
            put(root, path, content)
    return read_product_name(Tree(root))


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("DGXH100", "DGXH100"),
        ("p5.48xlarge", "p5.48xlarge"),
        ("PowerEdge XE9680  ", "PowerEdge XE9680"),
        ("Standard PC (Q35 + ICH9, 2009)", "Standard PC (Q35 + ICH9, 2009)"),
        ("A\x1b[31m\tB\nC", "A [31m B C"),
        (b"A\xff\xfeB\0\0", "A B"),
        ("To Be Filled By O.E.M.", ""),
        ("To be filled by O.E.M.", ""),
        ("System Product Name", ""),
        ("Default string", ""),
        ("Not Specified", ""),
        (" .  ", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_product(product: str | bytes | None, name: str, tmp_path: Path) -> None:
    assert read(tmp_path, product) == name


def test_name_has_an_end(tmp_path: Path) -> None:
    assert read(tmp_path, "x" * 50000) == "x" * LONGEST


@pytest.mark.parametrize("product", [None, "To Be Filled By O.E.M."])
def test_device_tree_names_what_dmi_does_not(product: str | None, tmp_path: Path) -> None:
    assert read(tmp_path, product, b"NVIDIA Jetson AGX Orin\0") == "NVIDIA Jetson AGX Orin"


def test_dmi_before_the_device_tree(tmp_path: Path) -> None:
    assert read(tmp_path, "GB200 NVL", b"board\0") == "GB200 NVL"


def test_link_out_of_the_root_is_not_followed(tmp_path: Path) -> None:
    put(tmp_path, "outside/product_name", "Another")
    (tmp_path / "root/sys/class/dmi").mkdir(parents=True)
    (tmp_path / "root/sys/class/dmi/id").symlink_to(tmp_path / "outside")
    assert read_product_name(Tree(tmp_path / "root")) == ""
