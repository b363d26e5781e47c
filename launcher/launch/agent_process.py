"""What the supervisor needs of an agent: torchrun as a process, or the launcher's own in this process."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from launcher.launch.job import Job
from launcher.launch.processes import RankProcess
from launcher.runs.run_directory import RunDir


class Agent(ABC):
    """Starts a node's ranks, waits for them, ends all if one has failed, and starts them again."""

    label: ClassVar[str] = "launch"
    """Its name in messages: `torchrun`, or `launch`."""
    gets_signals: ClassVar[bool] = False
    """It is a process of its own, which signals can reach past the supervisor."""

    @property
    def pids(self) -> Collection[int]:
        """PIDs of processes of the agent's own, which it ends itself and which are no leftovers."""
        return ()

    @property
    @abstractmethod
    def children(self) -> Collection[int]:
        """PIDs of children that the agent waits for: nobody else may reap them."""

    @property
    def descriptors(self) -> Collection[int]:
        """Descriptors that become readable once `poll` has something to do."""
        return ()

    @abstractmethod
    def begin(self) -> None:
        """Start it; raises OSError if that is not possible."""

    @abstractmethod
    def poll(self) -> int | None:
        """Do what is due; return its exit code once all is over (-n for signal n), None before."""

    @abstractmethod
    def list_ranks(self) -> Sequence[RankProcess]:
        """Return the ranks that it has started, at least those since the last call."""

    @abstractmethod
    def read_exit(self, pid: int) -> int | None:
        """Return what a rank has just ended with (-n for signal n), without reaping it; None if unknown."""

    @abstractmethod
    def read_exits(self) -> Mapping[int, int]:
        """Return what ranks ended with, by PID, as far as the agent knows (-n for signal n)."""

    def was_signalled(self) -> bool:
        """Tell whether a stopping signal has reached the agent past the supervisor."""
        return False

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """End the ranks by a signal, and start none after that."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    def close(self) -> None:  # noqa: B027 - most agents hold nothing
        """Give back what it holds; its ranks have ended, or will be ended by others."""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """What an agent of this process is made from."""

    job: Job
    run: RunDir
    environ: Mapping[str, str]
    """Each rank's, before the agent's own variables (see `launcher.launch.job.build_agent_environ`)."""
    has_terminal: bool = False
    """The job's one rank has a pseudo-terminal."""
