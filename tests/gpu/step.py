"""Runs one step of the proof in this process: `python -m tests.gpu.step NAME`, as `prove` starts it."""

import importlib
import os
import sys
from pathlib import Path

from tests.gpu.context import Context
from tests.gpu.records import Recorder

CPU, OUTPUT, RECORDS = "GPU_PROOF_CPU", "GPU_PROOF_OUTPUT", "GPU_PROOF_RECORDS"
"""Variables that `prove` hands over: whether there is to be no GPU, what keeps files, what records go to."""


def main() -> None:
    """Run the step in the working directory."""
    context = Context(
        record=Recorder(Path(os.environ[RECORDS])),
        cpu=os.environ[CPU] == "1",
        folder=Path.cwd(),
        output=Path(os.environ[OUTPUT]),
    )
    importlib.import_module(f"tests.gpu.steps.{sys.argv[1]}").run(context)


if __name__ == "__main__":
    main()
