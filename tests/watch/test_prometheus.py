"""Metrics for Prometheus: what is served and written is parsed by the client's own parser."""

import builtins
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from launcher.watch.prometheus import PrometheusExport, start_prometheus
from launcher.watch.watch_model import GpuSample, NodeReport, RankState

RANKS = (
    RankState(
        rank=8, local_rank=0, pid=7, attempt=0, phase="training", step=120, step_age=0.25, p50=0.4, p99=0.5,
        data_share=0.1, cpu=1.5, rss=1 << 30,
        gpu=GpuSample(3, utilization=0.9, sm_clock=1980, pcie_replays=2, xids=(79, 79),
                      event_reasons=("sw_power_cap",)),
    ),
    RankState(rank=9, local_rank=1, pid=8, attempt=0, phase="unwatched", step=0, step_age=None),
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


@contextmanager
def exporting(port: int | None, textfile: str | None = None) -> Iterator[tuple[PrometheusExport, list[str]]]:
    warnings: list[str] = []
    export = start_prometheus(
        "gpt/7", 'n"1\n', port=port, address="127.0.0.1", textfile=textfile, warn=warnings.append
    )
    assert export
    try:
        yield export, warnings
    finally:
        export.close(10)


def fetch(export: PrometheusExport, accept: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{export.port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text: bytes = answer.read()
    return text.decode()


def parse(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def find(samples: list[Sample], name: str, **labels: str) -> list[float]:
    return [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]


def test_what_is_served_is_what_the_report_says() -> None:
    with exporting(0) as (export, warnings):
        assert parse(fetch(export)) == []
        export.update(REPORT)
        found = parse(fetch(export))
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
    assert not [s for s in found if "temperature" in s.name], "what is not known is left out"
    assert warnings == []


def test_openmetrics_is_served_to_those_who_ask() -> None:
    with exporting(0) as (export, _):
        export.update(REPORT)
        text = fetch(export, "application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n") and "# TYPE launch_rank_steps counter" in text


def test_a_port_in_use_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with exporting(taken.getsockname()[1]) as (export, warnings):
            export.update(REPORT)
    assert len(warnings) == 1 and "choose watch.prometheus_port" in warnings[0]


def test_the_file_for_node_exporter_is_there_as_long_as_the_run(tmp_path: Path) -> None:
    with exporting(None, str(tmp_path)) as (export, warnings):
        export.update(REPORT)
        path, end = tmp_path / "launch-gpt_7-n_1_.prom", time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert find(parse(path.read_text()), "launch_rank_steps_total", rank="8") == [120]
        assert path.stat().st_mode & 0o400
    assert list(tmp_path.iterdir()) == [] and warnings == []


def test_a_folder_that_is_missing_is_one_warning(tmp_path: Path) -> None:
    with exporting(None, str(tmp_path / "none")) as (export, warnings):
        end = time.monotonic() + 30
        while not warnings:
            export.update(REPORT)
            assert time.monotonic() < end
            time.sleep(0.01)
        export.update(REPORT)
    assert len(warnings) == 1 and "watch.textfile" in warnings[0]


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
