"""torchrun as the agent of a node: a process, whose children are the ranks."""

import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.launch.agent import read_exits, was_signalled
from launcher.launch.processes import RankProcess, read_exitcode


@dataclass(slots=True)
class TorchrunAgent:
    """Runs torchrun, which `start` starts, or has started already to import torch."""

    start: Callable[[], "subprocess.Popen[bytes]"]
    log: Path
    find_ranks: Callable[[int], Sequence[RankProcess]]
    """Returns ranks that a process of this PID has started: all of them, or those since the last call."""
    label: str = "torchrun"
    gets_signals: bool = True
    pids: Collection[int] = ()
    log_begin: int = 0
    """Bytes of the log that are of earlier starts."""
    process: "subprocess.Popen[bytes]" = field(init=False)

    @property
    def children(self) -> Collection[int]:
        """PID of torchrun."""
        return (self.process.pid,)

    @property
    def descriptors(self) -> Collection[int]:
        """None: it is looked at again and again."""
        return ()

    def begin(self) -> None:
        """Start torchrun; raises OSError."""
        self.log_begin = self.log.stat().st_size if self.log.exists() else 0
        self.process = self.start()

    def poll(self) -> int | None:
        """Return torchrun's exit code; None while it runs."""
        return self.process.poll()

    def list_ranks(self) -> list[RankProcess]:
        """Return the ranks that torchrun has started, at least those since the last call."""
        return list(self.find_ranks(self.process.pid))

    def read_exit(self, pid: int) -> int | None:
        """Return what a rank ended with; None if torchrun has reaped it already."""
        return read_exitcode(pid)

    def read_exits(self) -> Mapping[int, int]:
        """Return what ranks ended with as far as torchrun's log tells."""
        return read_exits(self.log, self.log_begin)

    def was_signalled(self) -> bool:
        """Tell whether torchrun has said that it was sent a signal."""
        return was_signalled(self.log, self.log_begin)

    def send_signal(self, number: int) -> None:
        """Send torchrun a signal, which it passes on to the ranks."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End torchrun at once."""
        self.process.kill()

    def close(self) -> None:
        """Nothing is held but the process, which has ended or is ended as a leftover."""
