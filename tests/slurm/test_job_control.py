"""Signals while the job is requeued; tests/slurm/scenarios has what slurmctld answers to that."""

import os
import signal
import sys
from pathlib import Path

from launcher.slurm.job_control import SHORT_TIMEOUT, exclude_nodes, requeue_job

ASKS = f"""#!{sys.executable}
import signal, sys
sys.exit(0 if signal.getsignal(signal.SIGTERM) == signal.SIG_IGN else "SIGTERM would end this")
"""


def test_a_requeue_outlives_sigterm_and_this_process_hears_it_again(tmp_path: Path) -> None:
    command = tmp_path / "scontrol"
    command.write_text(ASKS)
    command.chmod(0o755)
    before = signal.getsignal(signal.SIGTERM)
    requeue_job("7", {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, SHORT_TIMEOUT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_slow_slurm_delays_signals_for_a_limited_time(tmp_path: Path) -> None:
    """Each answer comes in time, and all of them together do not."""
    sinfo = "case $* in *--nodes=*) echo n9;; *) echo n0 n1 n2 n9;; esac"
    answers = {"squeue": "echo 'n9||main'", "sinfo": sinfo, "scontrol": "true"}
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/given\nsleep 0.4\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = exclude_nodes("7", ["n0"], 1, environ, patience=1)
    assert told.startswith("n0 not excluded (")
    assert "scontrol" not in (tmp_path / "given").read_text()
    assert exclude_nodes("7", ["n0"], 1, environ, patience=60) == ""
    assert (tmp_path / "given").read_text().endswith("scontrol\n")
