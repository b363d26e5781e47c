"""What the supervisor tells the watcher on its stdin: the settings, then ranks found and ranks ended."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """`watch.*`, as config/settings.py has it."""

    hang_seconds: Any = "auto"
    on_hang: str = "report"
    interval: float = 5.0
    metrics_interval: float = 30.0
    prometheus_port: int | None = None
    prometheus_address: str = "127.0.0.1"
    textfile: str | None = None


@dataclass(frozen=True, slots=True)
class NotifySettings:
    """`notify.*`, as config/settings.py has it."""

    url: str | None = None
    format: str = "auto"
    events: tuple[str, ...] = ()
    ping_url: str | None = None
    ping_interval: float = 60.0


@dataclass(frozen=True, slots=True)
class WatcherSettings:
    """The first line."""

    run_dir: str
    run: str
    """`NAME/ID`."""
    folder: str
    """Where the node's ranks keep their heartbeats."""
    host: str
    node_rank: int
    nodes: int
    """Nodes of the job, at most."""
    attempt: int
    """Number of this start's first attempt."""
    ranks: int
    """Ranks on this node."""
    watch: WatchSettings
    notify: NotifySettings


@dataclass(frozen=True, slots=True)
class RankEntry:
    """A rank on this node."""

    rank: int
    local_rank: int
    attempt: int
    pid: int
    exit_code: int | None = None
    """As subprocess gives it; None for one that runs, or whose end nobody saw."""


@dataclass(frozen=True, slots=True)
class RankMessage:
    """A later line: ranks that were found, or have ended."""

    found: tuple[RankEntry, ...] = ()
    ended: tuple[RankEntry, ...] = ()
