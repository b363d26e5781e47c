"""The first process of a guest: sets each scenario up, runs it, reports over a serial line, powers off."""

import json
import os
import platform
import traceback
from pathlib import Path
from typing import Any

from .cgroups import mount_cgroups
from .driver import pretend_driver
from .scenario import Scenario
from .syscalls import mount, power_off

SCENARIOS = Path(__file__).parents[1] / "scenarios.json"
REPORT = Path("/dev/ttyS1")
RESULT = Path("/tmp/result.json")


def main() -> None:
    """Run everything that the host asks for; whatever goes wrong is in the report."""
    try:
        report = run_all(json.loads(SCENARIOS.read_text()))
    except Exception:
        report = {"error": traceback.format_exc()}
    REPORT.write_text(json.dumps(report))
    power_off()


def run_all(orders: dict[str, Any]) -> dict[str, Any]:
    """Bring the system up and run the scenarios, each in a process of its own."""
    for kind, target in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/tmp")):
        mount(kind, target)
    mount("tmpfs", "/dev/shm", "size=64m")
    mount_cgroups(orders["cgroup"])
    pretend_driver()
    scenarios = [Scenario(**entry) for entry in orders["scenarios"]]
    results = {scenario.name: run_apart(scenario, orders["cgroup"]) for scenario in scenarios}
    return {"kernel": platform.release(), "scenarios": results}


def run_apart(scenario: Scenario, version: int) -> dict[str, Any]:
    """Run one scenario in a child, which alone enters the cgroup and takes the filter on."""
    # Imported late, so that a launcher that cannot be imported is in the report too.
    from .job import run_job

    print(f"lab: {scenario.name}", flush=True)
    RESULT.unlink(missing_ok=True)
    switch(scenario.offline, on=False)
    child = os.fork()
    if child == 0:
        try:
            result = run_job(scenario, version)
        except BaseException:
            result = {"error": traceback.format_exc()}
        RESULT.write_text(json.dumps(result))
        os._exit(0)
    os.waitpid(child, 0)
    switch(scenario.offline, on=True)
    result = json.loads(RESULT.read_text())
    if "error" in result:
        print(result["error"], flush=True)
    return dict(result)


def switch(cpus: tuple[int, ...], on: bool) -> None:
    """Take CPUs offline, or back."""
    for cpu in cpus:
        Path(f"/sys/devices/system/cpu/cpu{cpu}/online").write_text(str(int(on)))
