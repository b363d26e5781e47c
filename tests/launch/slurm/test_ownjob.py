"""The requeue's commands, and what they leave of this process."""

import os
import signal
import sys
from pathlib import Path

from launcher.launch.slurm.ownjob import QUICK, requeue_job

ASKS = f"""#!{sys.executable}
import signal, sys
sys.exit(0 if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN else "SIGTERM would end this")
"""


def test_a_requeue_outlives_sigterm_and_this_process_hears_it_again(tmp_path: Path) -> None:
    command = tmp_path / "scontrol"
    command.write_text(ASKS)
    command.chmod(0o755)
    before = signal.getsignal(signal.SIGTERM)
    requeue_job("7", {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, QUICK)
    assert signal.getsignal(signal.SIGTERM) == before
