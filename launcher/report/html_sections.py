"""The report's sections of words: summary, warnings with their fixes, placement, attempts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.doctor.facts import Health
from launcher.doctor.finding import BindingTrial, Case
from launcher.doctor.placement_checks import find_damage, judge_host, judge_plan
from launcher.plan.model import Plan
from launcher.report.html_page import Advice, Chart, Fact, Head, HtmlTable, Section, make_chart
from launcher.report.inline_svg import inline_svg
from launcher.report.machine_picture import lay_out
from launcher.report.picture import measure_text, render_svg
from launcher.report.run_account import RunAccount
from launcher.report.run_table import shorten_time
from launcher.runs.manifest import read_time, take_dict, take_list
from launcher.runs.secrets import mask_words
from launcher.text import clean_text, count_things, describe_time, join_words, shorten_cpulist
from launcher.watch.model import Straggler

LONGEST = 2000
"""Characters of a text."""
MOST_WARNINGS = 40
MOST_ALIKE = 4
"""Warnings with one reason and one fix that are named."""
MOST_PICTURES = 3
"""Machines that are drawn; others are often alike, and those alike are drawn once."""
MOST_ROWS = 64
"""Rows of a table."""
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
TONES = {"succeeded": "good", "failed": "bad", "lost": "bad", "unknown": "bad", "stopped": "fair"}


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A host's plan, and the classes of its cores by their capacity."""

    host: str
    plan: Plan
    classes: Mapping[int, int]


def describe_end(account: RunAccount) -> str:
    """Say in a sentence or two how the run stands or ended."""
    status = account.status
    seconds = account.end - account.begin
    step = f" at step {format_step(account)}" if format_step(account) else ""
    if status.is_live:
        past = f"{describe_time(seconds)} after its start"
        head = f"It is {status.state}{step}, {past}; this is what there is so far."
    else:
        verb = "is" if status.state in ("lost", "unknown") else "has"
        head = f"It {verb} {status.state} after {describe_time(seconds)}{step}."
    return clean_text(f"{head} {sentence(status.reason)}".strip(), LONGEST)


def sentence(text: str) -> str:
    """Return a text as a sentence."""
    return f"{text[:1].upper()}{text[1:]}." if text and not text.endswith(".") else text


def format_step(account: RunAccount) -> str:
    """Return the step that the run has come to: `120/400`."""
    status = account.status
    if status.step is not None:
        return f"{status.step}/{status.total}" if status.total else str(status.step)
    steps = [account.job.step if account.job else 0]
    steps += [state.step for report in account.samples for state in report.ranks]
    return str(max(steps)) if max(steps) else ""


def make_summary(account: RunAccount) -> Section:
    """Return what ran, from which sources, where and when."""
    facts = [fact for fact in list_facts(account) if fact.text]
    return Section("summary", "What ran", facts=tuple(facts))


def list_facts(account: RunAccount) -> Iterator[Fact]:
    """Give the facts of a run; those that are not known are empty."""
    status, manifest = account.status, account.manifest
    yield Fact("Command", clean_text(join_words(mask_words(status.command)), LONGEST), is_code=True)
    yield Fact("Directory", clean_text(str(manifest.get("directory") or ""), LONGEST), is_code=True)
    yield Fact("Run directory", clean_text(status.path, LONGEST), is_code=True)
    yield Fact("Started", show_time(status.attempts[0].started if status.attempts else status.started))
    yield Fact("Ended", show_time(status.ended) if not status.is_live else "")
    yield Fact("Duration", describe_time(account.end - account.begin))
    yield Fact("Ranks", describe_ranks(account))
    yield Fact("Nodes", clean_text(f"{status.nodes}: {status.nodelist}", 400) if status.nodes else "")
    yield Fact("SLURM job", status.job_id or "")
    yield Fact("Steps", format_step(account))
    yield Fact("Exit code", "" if status.exit_code is None else str(status.exit_code))
    yield Fact("Git commit", describe_commit(take_dict(manifest, "git")), is_code=True)
    packages = take_dict(manifest, "packages")
    yield Fact("Versions", clean_text(", ".join(f"{name} {packages[name]}" for name in packages), 400))
    yield from list_failure(account)


def show_time(text: str) -> str:
    """Return a time of the manifest's with its zone, to the second."""
    zone = text[-6:] if text[-6:-5] in ("+", "-") else ""
    return f"{shorten_time(text)} {clean_text(zone)}".strip() if text else ""


def describe_ranks(account: RunAccount) -> str:
    """Return the number of ranks, as planned or as recorded."""
    planned = sum(len(host.planned) for host in account.records.hosts)
    known = max(planned, len({state.rank for one in account.reports for state in one.ranks}))
    return str(known) if known else ""


def describe_commit(git: Mapping[str, object]) -> str:
    """Return the commit, and whether files had been changed since."""
    commit = clean_text(str(git.get("commit") or ""))
    return f"{commit} with changes that are not committed" if commit and git.get("dirty") else commit


def list_failure(account: RunAccount) -> Iterator[Fact]:
    """Give who failed first, and its last lines."""
    failure = account.status.first_failure
    if failure:
        who = f"rank {failure.get('rank')} on {failure.get('host')} (local rank {failure.get('local_rank')})"
        yield Fact("First failure", clean_text(f"{who} {failure.get('reason')}", LONGEST))
        lines = [clean_text(str(line), 400) for line in take_list(failure, "last_lines")[-30:]]
        yield Fact("Its last lines", "\n".join(lines), is_code=True)


def make_warnings(account: RunAccount, hosts: Sequence[HostPlan]) -> Section:
    """Return what slowed or endangered the run, the worst first, each with what helps."""
    found: dict[Advice, list[str]] = {}
    for host, advice in (*judge_plans(hosts), *judge_records(account), *judge_watching(account)):
        found.setdefault(advice, []).append(host)
    several = len({host for names in found.values() for host in names if host}) > 1
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
                what = f"GPU {state.gpu.index} (rank {state.rank}) reported XID {numbers}"
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


def make_placement(account: RunAccount, hosts: Sequence[HostPlan]) -> Section:
    """Return where the ranks ran: a picture of each kind of machine, and a table."""
    figures = tuple(draw_machines(hosts))
    rows = tuple(list_placements(account))
    heads = ("rank", "host", "GPU", "CPUs", "memory on", "workers", "NIC", "as planned")
    numbers = ("workers",)
    left = f", the first {MOST_ROWS} of {len(rows)}" if len(rows) > MOST_ROWS else ""
    table = HtmlTable(
        f"What the ranks had{left}", tuple(Head(name, name in numbers) for name in heads), rows[:MOST_ROWS]
    )
    return Section("placement", "Where the ranks ran", figures=figures, tables=(table,) if rows else ())


def draw_machines(hosts: Sequence[HostPlan]) -> Iterator[Chart]:
    """Draw the machines with their ranks, those that look alike once."""
    alike: dict[object, list[str]] = {}
    plans: dict[object, HostPlan] = {}
    for host in hosts:
        key = describe_shape(host.plan)
        alike.setdefault(key, []).append(clean_text(host.host))
        plans.setdefault(key, host)
    for number, (key, names) in enumerate(list(alike.items())[:MOST_PICTURES]):
        host = plans[key]
        picture = render_svg(lay_out(host.plan, host.classes, "", measure_text))
        more = f", and on {count_things(len(names) - 1, 'more host')} like it" if len(names) > 1 else ""
        title = f"{count_things(len(host.plan.ranks), 'rank')} on {names[0]}{more}"
        about = (
            "Packages, NUMA nodes, caches, cores, GPUs and NICs, each in the colour of the rank that has it."
        )
        svg = inline_svg(picture, f"machine{number}", title, about, smallest=0.7)
        left = len(alike) - MOST_PICTURES if number == MOST_PICTURES - 1 else 0
        notes = (f"{count_things(left, 'other kind')} of hosts are not drawn.",) if left > 0 else ()
        yield make_chart(title, [("light", svg)], notes=notes)


def describe_shape(plan: Plan) -> object:
    """Return what a picture of a plan shows, less the names of the devices."""
    machine = plan.machine
    ranks = tuple((rank.cpus, rank.worker_cpus, rank.nic, rank.memory) for rank in plan.ranks)
    gpus = tuple((gpu.pci, gpu.node, gpu.name) for gpu in machine.gpus)
    return machine.cpus, machine.allowed_cpus, gpus, ranks


def list_placements(account: RunAccount) -> Iterator[tuple[str, ...]]:
    """Give a row for each rank that left a record."""
    for host in account.records.hosts:
        wrong = [finding.what for finding in judge_host(host, True)]
        planned = {rank.local_rank: rank for rank in host.planned}
        for record in host.records:
            plan = planned.get(record.local_rank)
            gpu = f"{plan.gpu.index} {plan.gpu.pci}" if plan and plan.gpu else "none"
            cells = (
                str(record.rank),
                record.host,
                gpu if record.gpu is not None else "none",
                record.cpus,
                f"node {shorten_cpulist(record.memory.nodes)}" if record.memory.nodes else "any node",
                "?" if record.num_workers is None else str(record.num_workers),
                (plan.nic if plan else None) or "none",
                "no"
                if any(f"rank {record.rank} " in f"{what} " for what in wrong)
                else "yes"
                if plan
                else "no plan",
            )
            yield tuple(clean_text(cell, 120) for cell in cells)


def make_attempts(account: RunAccount) -> Section:
    """Return the table of the starts of the job."""
    names = ("attempt", "started", "ended", "duration", "ranks restarted", "state", "reason")
    heads = tuple(Head(name, name in ("attempt", "duration", "ranks restarted")) for name in names)
    rows = []
    for number, attempt in enumerate(account.status.attempts):
        begin, end = read_time(attempt.started), read_time(attempt.ended)
        state = account.status.state if attempt.state == "running" else attempt.state
        until = end if end is not None else account.end
        times = [event.time for event in account.events if event.kind == "restart"]
        restarts = sum(begin is not None and begin + 1 < time <= until for time in times)
        rows.append(
            (
                str(number),
                show_time(attempt.started),
                show_time(attempt.ended) or ("goes on" if account.status.is_live else "not known"),
                describe_time(max(0.0, until - begin)) if begin is not None else "?",
                str(restarts),
                state,
                clean_text(attempt.reason, LONGEST),
            )
        )
    table = HtmlTable("Starts of the job", heads, tuple(rows[-MOST_ROWS:]))
    return Section("attempts", "Attempts", tables=(table,) if rows else ())
