"""Fixtures for the tests of the bundled program."""

import os

import pytest

from .start_program import Start


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Give a way to start the program on a short text."""
    folder = tmp_path_factory.mktemp("programs")
    text = folder / "text.txt"
    text.write_bytes(b"".join(b"%d squared is %d; " % (n, n * n) for n in range(2000)))
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_"))}
    return Start(environ | {"OMP_NUM_THREADS": "1"}, text)
