"""Signals: a checkpoint on SIGTERM and SIGUSR2, at the same step on all ranks; prompt death on SIGINT."""

import multiprocessing
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist

EXIT_RESTART = os.EX_TEMPFAIL
"""Exit code of a program that was stopped, and goes on from its checkpoint when it is started again."""
NOTHING, CHECKPOINT, STOP = 0, 1, 2
"""What a rank asks for; all ranks do the largest of these."""
ACTIONS = {signal.SIGUSR2: CHECKPOINT, signal.SIGTERM: STOP}


def die_by_signal(number: int) -> NoReturn:
    """End this process by a signal, so that the parent sees 128 + n."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise AssertionError("a fatal signal returned")


def exit_with(status: int) -> NoReturn:
    """End with an exit code, whatever signals come meanwhile.

    torchrun sends SIGTERM as soon as the first rank has ended, and Python's finalization takes handlers away
    (but leaves what is ignored).
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(status)


def kill_workers() -> None:
    """End this process's children: DataLoader workers ignore SIGTERM, and exit would wait for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would take it for a failure
    for child in multiprocessing.active_children():
        child.kill()


class SignalWatch:
    """Receives this rank's signals, and agrees with the other ranks on what to do."""

    def __init__(self) -> None:
        self.asked = NOTHING
        self.vote: tuple[dist.Work, torch.Tensor] | None = None
        for number in ACTIONS:
            signal.signal(number, self.receive)
            signal.siginterrupt(number, False)  # system calls of libraries go on

    def receive(self, number: int, _: FrameType | None) -> None:
        """Remember a signal."""
        self.asked = max(self.asked, ACTIONS[signal.Signals(number)])

    def exchange(self) -> int:
        """Give what all ranks agreed on a step ago, and start the next agreement; once each step.

        One small all_reduce between CPUs runs beside the next step: no rank waits for its GPU, and all read
        the same answer at the same step, although a signal reaches them at different times.
        """
        agreed = self.finish_vote()
        vote = torch.tensor(self.asked)
        # Nothing is lost to a signal in between: a smaller request was part of the larger one.
        self.asked = NOTHING if self.asked == int(vote) else self.asked
        work = dist.all_reduce(vote, dist.ReduceOp.MAX, async_op=True)
        if work is not None:
            self.vote = (work, vote)
        return agreed

    def finish_vote(self) -> int:
        """Give the result of the agreement that was started last."""
        if self.vote is None:
            return NOTHING
        work, vote = self.vote
        work.wait()
        self.vote = None
        return int(vote.item())
