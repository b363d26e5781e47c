"""A node's task tells the job's first node again and again that it is there."""

import os
import threading

from launcher.agent.group_messages import NodeReport, render_task_report
from launcher.agent.liveness import ALIVE_PERIOD
from launcher.slurm.node_control import can_write


def start_alive_sender(host: str, descriptor: int = 2) -> None:
    """Begin, by a thread of its own: the task may wait for a filesystem, or for its ranks' ends.

    It ends with the process. A line is written whole or not at all.
    """
    line = f"{render_task_report(NodeReport('alive', host))}\n".encode()
    pause = threading.Event()

    def send_lines() -> None:
        while True:
            try:
                if can_write(descriptor):
                    os.write(descriptor, line)
            except OSError:
                return
            pause.wait(ALIVE_PERIOD)

    threading.Thread(target=send_lines, daemon=True).start()
