"""PCI addresses."""

import pytest

from launcher.probe.pci import normalise_pci


@pytest.mark.parametrize(
    ("text", "sysfs"),
    [
        ("0000:07:00.0", "0000:07:00.0"),
        ("00000000:0F:00.0", "0000:0f:00.0"),
        ("00010000:00:04.0", "10000:00:04.0"),
        ("10000:00:04.1", "10000:00:04.1"),
        ("0000:C1:1f.7", "0000:c1:1f.7"),
        ("0008:01:00", "0008:01:00.0"),
    ],
)
def test_every_spelling_becomes_the_one_of_sysfs(text: str, sysfs: str) -> None:
    assert normalise_pci(text) == sysfs
    assert normalise_pci(sysfs) == sysfs


@pytest.mark.parametrize(
    "text",
    ["", "07:00.0", "0000:07:20.0", "0000:07:00.8", "0000:100:00.0", "x:07:00.0", "-1:0:0.0", "0:0:0:0"],
)
def test_other_texts_are_no_address(text: str) -> None:
    assert normalise_pci(text) is None
