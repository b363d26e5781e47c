"""The report's section of warnings: what slowed or endangered the run, and what helps."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher.doctor.facts import Health
from launcher.doctor.finding import BindingTrial, Case
from launcher.doctor.placement_checks import find_damage, judge_host, judge_plan
from launcher.report.html_page import Advice, Section
from launcher.report.html_placement import HostPlan
from launcher.report.run_account import RunAccount
from launcher.text import clean_text, count_things
from launcher.watch.watch_model import Straggler

LONGEST = 2000
"""Characters of a text."""
MOST_WARNINGS = 40
MOST_ALIKE = 4
"""Warnings with one reason and one fix that are named."""
LEVELS = ("error", "warning", "note")
FIXES = {
    "data": "give it more DataLoader workers (`launch tune dataloader` finds the number), or faster storage",
    "run_delay": "end what else runs on its cores, or keep binding=exclusive and ask for whole nodes",
    "cpu_quota": "raise the CPU limit of the container or the cgroup, or ask for as many CPUs as it needs",
    "memory_pressure": "ask for more memory, or use fewer DataLoader workers",
    "page_faults": "lock or preload what it maps, and keep its memory on its own NUMA node",
    "gpu_clock": "see to the node's cooling and power: `nvidia-smi -q -d PERFORMANCE` names the reason",
    "pcie": "have the GPU reseated, or leave the node out until its link has its full width",
    "nic": "have the link looked at, or leave the node out",
    "program": "profile this rank: its own code takes longer than the others'",
}
"""What helps, by the cause of a straggler."""


def make_warnings(account: RunAccount, hosts: Sequence[HostPlan]) -> Section:
    """Return what slowed or endangered the run, the worst first, each with what helps."""
    found: dict[Advice, list[str]] = {}
    for host, advice in (*judge_plans(hosts), *judge_records(account), *judge_watching(account)):
        found.setdefault(advice, []).append(host)
    several = max(account.status.nodes, len(account.reports), len(hosts)) > 1
    listed = [name_hosts(advice, names if several else []) for advice, names in found.items()]
    listed = sorted(gather_alike(listed), key=lambda advice: LEVELS.index(advice.level))
    left = len(listed) - MOST_WARNINGS
    text = (f"{count_things(left, 'more')} of them are not shown.",) if left > 0 else ()
    return Section("warnings", "Warnings and fixes", text, findings=tuple(listed[:MOST_WARNINGS]))


def gather_alike(found: Sequence[Advice]) -> Iterator[Advice]:
    """Put together what has the same reason and the same fix, if that is much."""
    groups: dict[tuple[str, str, str], list[Advice]] = {}
    for advice in found:
        groups.setdefault((advice.level, advice.why, advice.fix), []).append(advice)
    for group in groups.values():
        if len(group) <= MOST_ALIKE or not group[0].fix:
            yield from group
            continue
        also = [advice.what for advice in group[1:MOST_ALIKE]]
        also.append(f"and {len(group) - MOST_ALIKE} more of the kind")
        yield replace(group[0], also=tuple(also))


def name_hosts(advice: Advice, hosts: Sequence[str]) -> Advice:
    """Say on which hosts something was found."""
    known = [host for host in dict.fromkeys(hosts) if host]
    if not known:
        return advice
    named = ", ".join(known[:4]) + (f" and {len(known) - 4} more" if len(known) > 4 else "")
    return replace(advice, what=clean_text(f"{named}: {advice.what}", LONGEST))


def judge_plans(hosts: Sequence[HostPlan]) -> Iterator[tuple[str, Advice]]:
    """Give the warnings of the plans."""
    for host in hosts:
        for finding in judge_plan(Case(host.plan, Health(), BindingTrial())):
            if finding.level in LEVELS:
                yield (
                    clean_text(host.host),
                    make_advice(finding.level, finding.what, finding.why, finding.fix),
                )


def judge_records(account: RunAccount) -> Iterator[tuple[str, Advice]]:
    """Give where ranks had something else than was planned, and files that are damaged."""
    going = account.status.is_live
    found = [*find_damage(account.records)]
    found += [one for host in account.records.hosts for one in judge_host(host, going)]
    for finding in found:
        if finding.level in LEVELS:
            yield "", make_advice(finding.level, finding.what, finding.why, finding.fix)


def judge_watching(account: RunAccount) -> Iterator[tuple[str, Advice]]:
    """Give the stragglers, and what the watchers had to say."""
    for found in account.job.stragglers if account.job else ():
        yield "", advise_straggler(found)
    for note in account.job.notes if account.job else ():
        yield "", make_advice("note", note)
    for report in account.reports:
        for note in report.notes:
            yield clean_text(report.host), make_advice("note", note)
        for state in report.ranks:
            for note in state.notes:
                yield clean_text(report.host), make_advice("note", note)
            if state.gpu and state.gpu.xids:
                numbers = ", ".join(map(str, state.gpu.xids[:8]))
                what = f"GPU {state.gpu.index} of rank {state.rank} reported XID {numbers}"
                why = "the driver reports errors of the GPU, or of what runs on it, by these numbers"
                fix = "look the number up in NVIDIA's list of XID errors, and drain the node if it says so"
                yield clean_text(report.host), make_advice("warning", what, why, fix)


def advise_straggler(found: Straggler) -> Advice:
    """Return a straggler with what helps."""
    what = (
        f"rank {found.rank} on {found.host} was {100 * found.excess:.0f}% slower than the others from step "
        f"{found.first_step} to {found.last_step}: {found.detail}"
    )
    return make_advice(
        "warning", what, "all ranks wait for the slowest in each step", FIXES.get(found.cause, "")
    )


def make_advice(level: str, what: str, why: str = "", fix: str = "") -> Advice:
    """Return what was found, its texts bounded."""
    return Advice(level, clean_text(what, LONGEST), clean_text(why, LONGEST), clean_text(fix, LONGEST))
