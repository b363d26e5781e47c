"""Metrics for Prometheus of what only GPUs and clusters have; the others are in `test_outputs`."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from launcher.watch.metrics import start_prometheus
from launcher.watch.model import GpuSample, NodeReport, Rank
from tests.seam import wait_for
from tests.watch.test_outputs import find

RANKS = (
    Rank(
        rank=8, local_rank=0, pid=7, attempt=0, phase="training", step=120, step_age=0.25, p50=0.4, p99=0.5,
        data_share=0.1, cpu=1.5, rss=1 << 30,
        gpu=GpuSample(3, utilization=0.9, sm_clock=1980, pcie_replays=2, xids=(79, 79),
                      event_reasons=("sw_power_cap",)),
    ),
    Rank(rank=9, local_rank=1, pid=8, attempt=0, phase="unwatched", step=0, step_age=None),
)  # fmt: skip
REPORT = NodeReport(
    'n"1\n',
    1,
    2,
    0,
    1000.0,
    1,
    5.0,
    RANKS,
    stalled_since=970.0,
    nic_rates=(("mlx5_0", 25e9),),
    io_pressure=0.03,
)
RANK = {"run": "gpt/7", "host": 'n"1\n', "rank": "8", "local_rank": "0"}


def test_what_is_written_is_what_the_report_says(tmp_path: Path) -> None:
    export = start_prometheus(
        "gpt/7", 'n"1\n', port=None, address="", textfile=str(tmp_path), warn=pytest.fail
    )
    assert export
    export.update(REPORT)
    wait_for(lambda: list(tmp_path.glob("*.prom")), "the file")
    found = (tmp_path / "launch-gpt_7-n_1_.prom").read_text()
    export.end_file(30)
    assert list(tmp_path.iterdir()) == []
    assert find(found, "launch_rank_steps_total", **RANK) == [120]
    assert find(found, "launch_rank_step_seconds", **RANK, quantile="0.99") == [0.5]
    assert find(found, "launch_rank_data_wait_ratio") == [0.1]
    assert find(found, "launch_rank_resident_memory_bytes", rank="8") == [1 << 30]
    assert find(found, "launch_rank_phase", rank="8", phase="training") == [1]
    assert find(found, "launch_rank_phase", rank="8", phase="saving") == [0]
    assert find(found, "launch_rank_phase", rank="9", phase="unwatched") == [1]
    assert find(found, "launch_gpu_sm_clock_hertz", **RANK, gpu="3") == [1.98e9]
    assert find(found, "launch_gpu_xid_errors_total", xid="79") == [2]
    assert find(found, "launch_gpu_clock_event", reason="sw_power_cap") == [1]
    assert find(found, "launch_gpu_pcie_replays_total") == [2]
    assert find(found, "launch_node_network_bytes_per_second", device="mlx5_0") == [25e9]
    assert find(found, "launch_node_pressure_ratio") == [0.03]
    assert find(found, "launch_node_stalled_seconds", host='n"1\n') == [30]


def test_without_the_client_the_warning_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for port in (0, None):
        found = start_prometheus("r", "h", port=port, address="::", textfile=None, warn=warnings.append)
        assert found is None
    assert len(warnings) == 1 and "pip install 'launch-ranks[metrics]'" in warnings[0]
