"""Clocks: how the frequency of the job's CPUs is chosen.

Source: the kernel's Documentation/admin-guide/pm/cpufreq.rst, intel_pstate.rst and amd-pstate.rst.
"""

from collections.abc import Iterator

from launcher.cpulist import format_cpulist
from launcher.doctor.finding import Case, Finding, pass_check, skip_check
from launcher.probe.health import Clock

CLOCKS = "clocks"
HARDWARE = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose `powersave` is dynamic: the processor chooses, by the energy preference."""
SPARING = ("power", "balance_power")
"""Energy preferences that hold clocks down."""
LOWEST = "with this driver, powersave is always the lowest frequency"
SLOW = "clocks rise after the load has come: launching kernels and loading data happen in short bursts"
EAGER = "sudo cpupower frequency-set -g performance"
PREFER = "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/energy_performance_preference"


def judge_clocks(case: Case) -> Iterator[Finding]:
    """The governors of the allowed CPUs."""
    if not case.health.clocks:
        yield skip_check(case, CLOCKS, "frequency", "there is no cpufreq (as in most virtual machines)")
    for clock in case.health.clocks:
        yield judge_clock(clock)


def judge_clock(clock: Clock) -> Finding:
    """CPUs of one driver, governor and preference."""
    choice = f", {clock.preference}" if clock.preference else ""
    said = (
        f"{clock.governor} ({clock.driver or 'driver unknown'}{choice}) on CPUs {format_cpulist(clock.cpus)}"
    )
    if clock.governor == "performance":
        return pass_check(CLOCKS, said)
    if clock.driver in HARDWARE and clock.governor == "powersave":
        if clock.preference == "performance":
            return pass_check(CLOCKS, said)
        return Finding("warning" if clock.preference in SPARING else "note", CLOCKS, said, SLOW, PREFER)
    if clock.governor == "userspace":
        why = "clocks stay where somebody has put them"
        return Finding("note", CLOCKS, said, why, f"cpupower frequency-info shows where; {EAGER}")
    why = LOWEST if clock.governor == "powersave" else SLOW
    return Finding("warning", CLOCKS, said, why, EAGER)
