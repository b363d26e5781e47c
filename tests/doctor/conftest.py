"""One healthy tree for a whole module: it has a thousand files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doctor.healthy_tree import write_healthy
from tests.probe.machine_trees import short_lived


@pytest.fixture(scope="module")
def healthy() -> Iterator[Path]:
    """The healthy machine's root."""
    with short_lived() as folder:
        yield write_healthy(folder / "root")
