"""The report's section of hangs: the verdict, what each rank was at, and the stacks, equal ones once."""

from collections.abc import Iterator, Sequence

from launcher.cpulist import format_cpulist
from launcher.report.html_page import HangText, Section, StackGroup, StackText
from launcher.report.run_account import RunAccount
from launcher.text import clean_text, count_things, describe_time
from launcher.watch.watch_model import Hang, NodeEvidence, ProcessState, RankEvidence, Stack

MOST_STACKS = 16
"""Different stacks of a hang that are shown."""
MOST_FRAMES = 60
LONGEST = 400
ACTIONS = {
    "report": "It was reported, and the ranks were left alone.",
    "restart": "The ranks were started again.",
    "stop": "The job was stopped.",
}


def make_hangs(account: RunAccount) -> Section:
    """Return all hangs."""
    hangs = tuple(describe_one(account, hang, evidence) for hang, evidence in account.hangs)
    return Section("hangs", "Hangs", hangs=hangs)


def describe_one(account: RunAccount, hang: Hang, evidence: Sequence[NodeEvidence]) -> HangText:
    """Return a hang in words."""
    since = describe_time(max(0.0, hang.stalled_since - account.begin))
    until = account.end if hang.recovered is None else hang.recovered
    lasted = describe_time(max(0.0, until - hang.stalled_since))
    told = describe_time(max(0.0, hang.time - hang.stalled_since))
    end = "then steps went on" if hang.recovered is not None else "and steps did not go on"
    action = ACTIONS.get(hang.action, "")
    text = f"No steps for {lasted}, {end}. The verdict came {told} after the last step. {action}"
    return HangText(
        title=f"Hang {hang.number}, at step {hang.step}, {since} after the start",
        sentence=clean_text(hang.verdict.sentence, 2000),
        text=text.strip(),
        groups=tuple(list_groups(hang, evidence)),
    )


def list_groups(hang: Hang, evidence: Sequence[NodeEvidence]) -> Iterator[StackGroup]:
    """Give the ranks that hold the others up, each by itself, and then all others by their stacks."""
    ranks = [rank for node in evidence for rank in node.ranks]
    named = [rank for rank in ranks if rank.rank in hang.verdict.ranks]
    for rank in named[:4]:
        yield StackGroup(name_rank(rank), tuple(describe_rank(rank)), tuple(list_stacks(rank)))
    others = [rank for rank in ranks if rank not in named[:4]]
    if others:
        stacks = tuple(gather_stacks(others))
        title = f"The other {count_things(len(others), 'rank')}, by what their main threads do"
        yield StackGroup(title if named else title.replace("other ", ""), (), stacks)


def name_rank(rank: RankEvidence) -> str:
    """Return a rank with its host."""
    return clean_text(f"Rank {rank.rank} on {rank.host} (PID {rank.pid})", LONGEST)


def describe_rank(rank: RankEvidence) -> Iterator[str]:
    """Say what is known of a rank."""
    age = "no step yet" if rank.step_age is None else f"its last step was {describe_time(rank.step_age)} ago"
    yield clean_text(
        f"Phase {rank.phase}, step {rank.step}, {age}. {describe_kernel_state(rank.process)}", LONGEST
    )
    for group in rank.groups:
        text = f"{group.name}: enqueued {group.last_enqueued}, completed {group.last_completed}"
        pending = f", {group.operation} {group.sizes} is pending" if group.is_pending else ""
        yield clean_text(text + pending, LONGEST)
    for note in rank.notes[:10]:
        yield clean_text(note, LONGEST)


def describe_kernel_state(process: ProcessState) -> str:
    """Say what the kernel says of a process."""
    words = [f"state {process.state}"]
    words += [f"waits in {process.wait_channel}"] if process.wait_channel else []
    words += [f"system call {process.system_call}"] if process.system_call else []
    words += [f"{process.cpu:.2f} cores in use"]
    return f"PID {process.pid}: {', '.join(words)}."


def list_stacks(rank: RankEvidence) -> Iterator[StackText]:
    """Give the stacks of a rank and its children, the main thread's first."""
    for process in (rank.process, *rank.children[:8]):
        child = "" if process is rank.process else f"child {process.command} (PID {process.pid}), "
        for stack in sorted(process.stacks, key=lambda one: not one.is_current)[:12]:
            main = "main thread" if stack.is_current else f"thread {stack.thread}"
            yield StackText(clean_text(f"{child}{main}", LONGEST), format_stack(stack))


def gather_stacks(ranks: Sequence[RankEvidence]) -> Iterator[StackText]:
    """Give the main threads' stacks, each once with the ranks that have it, the most common first."""
    found: dict[str, set[int]] = {}
    for rank in ranks:
        main = next((stack for stack in rank.process.stacks if stack.is_current), None)
        main = main or next(iter(rank.process.stacks), None)
        text = (
            format_stack(main)
            if main
            else f"no stack; {describe_kernel_state(rank.process).partition(': ')[2]}"
        )
        found.setdefault(text, set()).add(rank.rank)
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), min(item[1])))
    for text, having in ordered[:MOST_STACKS]:
        names = format_cpulist(frozenset(having))
        yield StackText(clean_text(f"{count_things(len(having), 'rank')}: {names}", LONGEST), text)
    if len(ordered) > MOST_STACKS:
        yield StackText(f"{len(ordered) - MOST_STACKS} more stacks are in the run directory", "")


def format_stack(stack: Stack) -> str:
    """Return a stack, innermost call first."""
    lines = [f"{frame.file}:{frame.line}, {frame.function}" for frame in stack.frames[:MOST_FRAMES]]
    lines += ["…"] if len(stack.frames) > MOST_FRAMES else []
    return "\n".join(clean_text(line, LONGEST) for line in lines)
