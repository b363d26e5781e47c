"""What the supervisor needs of an agent: torchrun as a process, or the launcher's own in this process."""

from collections.abc import Collection, Mapping
from typing import Protocol

from launcher.launch.processes import RankProcess


class Agent(Protocol):
    """Starts a node's ranks, waits for them, ends all if one has failed, and starts them anew."""

    label: str
    """Its name in messages: `torchrun`, or `launch`."""

    @property
    def pids(self) -> Collection[int]:
        """PIDs of processes of the agent's own, which are not the program's."""
        ...

    def begin(self) -> None:
        """Start it; raises OSError if that is not possible."""
        ...

    def poll(self) -> int | None:
        """Do what is due; return its exit code once all is over (-n for signal n), None before."""
        ...

    def list_ranks(self) -> list[RankProcess]:
        """Return the ranks that it has started since the last call."""
        ...

    def read_exits(self) -> Mapping[int, int]:
        """Return what ranks ended with, by PID, as far as the agent knows (-n for signal n)."""
        ...

    def send_signal(self, number: int) -> None:
        """End the ranks by a signal, and start none after that."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...
