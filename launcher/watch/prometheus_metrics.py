"""A node's report as Prometheus' metrics, by its client library and its conventions for names and units.

Source of the conventions: https://prometheus.io/docs/practices/naming/ (base units, `_total`, `_ratio`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from launcher.watch.watch_model import PHASES, GpuSample, NodeReport, RankState

NODE = ("run", "host")
RANK = (*NODE, "rank", "local_rank")
GPU = (*RANK, "gpu")
MHZ = 1e6
RankField = tuple[str, str, Callable[[RankState], float | None]]
GpuField = tuple[str, str, Callable[[GpuSample], float | None]]
RANK_FIELDS: tuple[RankField, ...] = (
    ("launch_rank_step_age_seconds", "Time since the rank's last step.", lambda r: r.step_age),
    ("launch_rank_data_wait_ratio", "Share of time that it waits for data.", lambda r: r.data_share),
    ("launch_rank_peer_wait_ratio", "Share of time that it waits for others.", lambda r: r.wait_share),
    ("launch_rank_cpu_cores", "Cores that it and its children use.", lambda r: r.cpu),
    ("launch_rank_run_delay_ratio", "Seconds per second that threads await a core.", lambda r: r.run_delay),
    ("launch_rank_throttled_ratio", "Seconds per second, by a CPU quota.", lambda r: r.throttled),
    ("launch_rank_resident_memory_bytes", "Memory of the rank and its children.", lambda r: r.rss),
    ("launch_rank_major_faults_per_second", "Page faults that read from a disk.", lambda r: r.major_faults),
    ("launch_rank_exit_code", "Exit code of a rank that has ended.", lambda r: r.exit_code),
)  # fmt: skip
GPU_FIELDS: tuple[GpuField, ...] = (
    ("launch_gpu_utilization_ratio", "Share of the time with a kernel running.", lambda g: g.utilization),
    ("launch_gpu_sm_activity_ratio", "Share of the SMs' time with a warp resident.", lambda g: g.sm_activity),
    ("launch_gpu_memory_used_bytes", "GPU memory in use.", lambda g: g.memory_used),
    ("launch_gpu_memory_total_bytes", "GPU memory.", lambda g: g.memory_total),
    ("launch_gpu_power_watts", "Power.", lambda g: g.power),
    ("launch_gpu_power_limit_watts", "Power limit.", lambda g: g.power_limit),
    ("launch_gpu_temperature_celsius", "Temperature.", lambda g: g.temperature),
    ("launch_gpu_sm_clock_hertz", "Clock of the SMs.", lambda g: convert_clock(g.sm_clock)),
    ("launch_gpu_sm_clock_max_hertz", "Highest clock of the SMs.", lambda g: convert_clock(g.max_sm_clock)),
    ("launch_gpu_pcie_link_width", "PCIe lanes in use.", lambda g: g.pcie_width),
    ("launch_gpu_pcie_link_width_max", "PCIe lanes at most.", lambda g: g.max_pcie_width),
)  # fmt: skip


def convert_clock(clock: int | None) -> float | None:
    """Return MHz in Hz."""
    return None if clock is None else clock * MHZ


class NodeCollector(Collector):
    """Gives Prometheus the last report of this node."""

    def __init__(self, run: str, host: str) -> None:
        self.labels = run, host
        self.report: NodeReport | None = None

    def collect(self) -> Iterator[Metric]:
        """Give all metrics that have a value."""
        if (report := self.report) is None:
            return
        for metric in (
            *self.build_rank_metrics(report),
            *self.build_gpu_metrics(report),
            *self.build_node(report),
        ):
            if metric.samples:
                yield metric

    def label(self, state: RankState) -> list[str]:
        """Return a rank's labels."""
        return [*self.labels, str(state.rank), str(state.local_rank)]

    def build_rank_metrics(self, report: NodeReport) -> Iterator[Metric]:
        """Give what is known of the ranks."""
        steps = CounterMetricFamily("launch_rank_steps", "Steps of the rank in this attempt.", labels=RANK)
        times = GaugeMetricFamily("launch_rank_step_seconds", "Time of a step.", labels=(*RANK, "quantile"))
        phases = GaugeMetricFamily("launch_rank_phase", "1 for what the rank does.", labels=(*RANK, "phase"))
        for state in report.ranks:
            labels = self.label(state)
            steps.add_metric(labels, state.step)
            for quantile, seconds in (("0.5", state.p50), ("0.99", state.p99)):
                add(times, [*labels, quantile], seconds)
            for phase in dict.fromkeys((*PHASES, state.phase)):
                phases.add_metric([*labels, phase], phase == state.phase)
        yield from (steps, times, phases)
        for name, text, get in RANK_FIELDS:
            yield make_gauge(name, text, RANK, [(self.label(state), get(state)) for state in report.ranks])

    def build_gpu_metrics(self, report: NodeReport) -> Iterator[Metric]:
        """Give what is known of the ranks' GPUs."""
        gpus = [([*self.label(r), str(r.gpu.index)], r.gpu) for r in report.ranks if r.gpu]
        for name, text, get in GPU_FIELDS:
            yield make_gauge(name, text, GPU, [(labels, get(gpu)) for labels, gpu in gpus])
        replays = CounterMetricFamily("launch_gpu_pcie_replays", "PCIe packets sent again.", labels=GPU)
        xids = CounterMetricFamily("launch_gpu_xid_errors", "XID errors so far.", labels=(*GPU, "xid"))
        reasons = GaugeMetricFamily(
            "launch_gpu_clock_event", "1 for why clocks are low.", labels=(*GPU, "reason")
        )
        for labels, gpu in gpus:
            if gpu.pcie_replays is not None:
                replays.add_metric(labels, gpu.pcie_replays)
            for xid in sorted(set(gpu.xids)):
                xids.add_metric([*labels, str(xid)], gpu.xids.count(xid))
            for reason in gpu.event_reasons:
                reasons.add_metric([*labels, reason], 1)
        yield from (replays, xids, reasons)

    def build_node(self, report: NodeReport) -> Iterator[Metric]:
        """Give what is known of the node."""
        labels = list(self.labels)
        rates = GaugeMetricFamily(
            "launch_node_network_bytes_per_second", "Received and sent.", labels=(*NODE, "device")
        )
        for device, rate in report.nic_rates:
            rates.add_metric([*labels, device], rate)
        pressure = GaugeMetricFamily(
            "launch_node_pressure_ratio",
            "Share of 10 s that some task waited (PSI).",
            labels=(*NODE, "resource"),
        )
        for resource in ("memory", "cpu", "io"):
            add(pressure, [*labels, resource], getattr(report, f"{resource}_pressure"))
        yield from (rates, pressure)
        stalled = 0 if report.stalled_since is None else report.time - report.stalled_since
        yield make_gauge(
            "launch_node_throttled_ratio",
            "Seconds per second, by a CPU quota.",
            NODE,
            [(labels, report.throttled)],
        )
        yield make_gauge(
            "launch_node_stalled_seconds",
            "Time without progress once it is a hang; else 0.",
            NODE,
            [(labels, stalled)],
        )
        yield make_gauge(
            "launch_node_report_timestamp_seconds", "When this was read.", NODE, [(labels, report.time)]
        )


def make_gauge(
    name: str, text: str, names: Sequence[str], values: Iterable[tuple[Sequence[str], float | None]]
) -> GaugeMetricFamily:
    """Return a gauge with the values that are known."""
    metric = GaugeMetricFamily(name, text, labels=names)
    for labels, value in values:
        add(metric, labels, value)
    return metric


def add(metric: GaugeMetricFamily, labels: Sequence[str], value: float | None) -> None:
    """Add a value if it is known."""
    if value is not None:
        metric.add_metric(labels, value)
