"""Starts a program as a rank that can be looked at: `watched_rank.py DIR PROGRAM [ARGUMENT …]`.

It does what the hook does in a rank: faulthandler on the stack signal with DIR/rank-RANK.stack, and torch's
server on DIR/rank-RANK.sock if the program uses torch.distributed.
"""

import faulthandler
import os
import runpy
import signal
import sys
from pathlib import Path


def main() -> None:
    folder, program = sys.argv[1:3]
    rank = os.environ["RANK"]
    file = Path(folder, f"rank-{rank}.stack").open("a")  # noqa: SIM115 - open for good
    faulthandler.register(signal.SIGRTMIN + 8, file=file, all_threads=True, chain=False)
    if os.environ.get("SERVER") == "1":
        from torch._C import _distributed_c10d

        server = _distributed_c10d._WorkerServer(f"{folder}/rank-{rank}.sock")  # noqa: F841
    sys.argv[:] = sys.argv[2:]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")


main()
