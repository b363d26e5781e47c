"""Options of `tests/gpu/prove`, and what its tests are given."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu.proof import Proof, Summary


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="there is to be no GPU")
    parser.addoption("--proof", type=Path, help="folder for summary.md and the files that are kept")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--proof", None):
        config.pluginmanager.register(Summary(config.getoption("--proof") / "summary.md"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the tests that need a GPU out of other runs: they import torch."""
    wanted = config.getoption("-m") == "gpu" or collection_path.name == "test_prove.py"
    return None if wanted or collection_path.suffix != ".py" else True


@pytest.fixture
def tools(
    request: pytest.FixtureRequest, tmp_path: Path, record_property: Callable[[str, object], None]
) -> Iterator[Proof]:
    """What a test works with, also without a GPU; the test fails if it leaves a process behind."""
    output = request.config.getoption("--proof", None)
    cpu = request.config.getoption("--cpu", default=False)
    made = Proof(cpu, tmp_path, output, record_property, f"LAUNCH_TEST_MARK=gpu-{uuid.uuid4()}")
    yield made
    made.wait_for_end()


@pytest.fixture
def proof(tools: Proof) -> Proof:
    """The same; without a GPU the test is skipped, or fails if it is to prove something."""
    tools.check_gpu()
    return tools
