"""What becomes of a job whose nodes were checked: on which it runs, or why it does not start."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from launcher.text import count_things, name_some

MAX_NAMED = 8
"""Nodes that a sentence names."""


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The nodes to go on with."""

    action: str
    """`start`; `leave_out`: on other nodes than foreseen; `stop`; `requeue`."""
    hosts: tuple[str, ...]
    """Where the ranks run; empty if the job does not start."""
    text: str = ""
    """For people; empty if there is nothing to say."""


def choose_hosts(
    candidates: Sequence[str],
    sick: Collection[str],
    *,
    on_failure: str,
    nodes: tuple[int, int],
    owned: bool,
    reserved: int = 0,
) -> NodeChoice:
    """Choose from the job's nodes, those that are foreseen first and then its spare ones.

    `nodes` are the fewest and the most that the job runs on, `on_failure` is `preflight.on_failure`,
    `owned` says that the job is ours to requeue, and `reserved` spare nodes were asked for
    (`cluster.spares`): these replace sick ones whatever `on_failure` says.
    """
    most = nodes[1]
    foreseen = tuple(candidates[:most])
    exchanged = exchange_sick_hosts(foreseen, candidates[most : most + reserved], sick)
    text = describe_exchange(foreseen, exchanged)
    if not {*exchanged} & {*sick}:
        return NodeChoice("leave_out" if text else "start", exchanged, text)
    others = (host for host in candidates if host not in exchanged and host not in foreseen)
    choice = choose_without_spares(
        (*exchanged, *others), sick, on_failure=on_failure, nodes=nodes, owned=owned
    )
    return replace(choice, text=f"{text}; {choice.text}") if text else choice


def choose_without_spares(
    candidates: Sequence[str],
    sick: Collection[str],
    *,
    on_failure: str,
    nodes: tuple[int, int],
    owned: bool,
) -> NodeChoice:
    """Do what `preflight.on_failure` says of nodes that are sick, and that no spare one has replaced."""
    fewest, most = nodes
    foreseen = tuple(candidates[:most])
    left_out = tuple(host for host in foreseen if host in sick)
    names, rule = name_some(left_out, MAX_NAMED), f"preflight.on_failure={on_failure}"
    if on_failure == "report":
        return NodeChoice("start", foreseen, f"the job starts all the same ({rule})")
    if on_failure == "stop":
        return NodeChoice("stop", (), f"the job does not start ({rule})")
    healthy = tuple(host for host in candidates if host not in sick)[:most]
    left = count_things(len(healthy), "node")
    if len(healthy) >= min(fewest, len(foreseen)) and healthy:
        spares = [host for host in healthy if host not in foreseen]
        on = f"{name_some(spares, MAX_NAMED)} in place of {names}" if spares else f"without {names}"
        return NodeChoice("leave_out", healthy, f"the job goes on {on}, on {left} ({rule})")
    short = f"{left} of the {fewest} that the job needs are left without {names}"
    if owned:
        return NodeChoice("requeue", (), f"{short}: it is to be requeued without it ({rule})")
    return NodeChoice(
        "stop", (), f"{short}, and this allocation is not launch's to requeue: ask for other nodes ({rule})"
    )


def exchange_sick_hosts(
    hosts: Sequence[str], spares: Sequence[str], sick: Collection[str]
) -> tuple[str, ...]:
    """Return the hosts with a healthy spare one in the place of each sick one, as far as there are any.

    A spare takes the sick node's place in the order, so that the others keep their neighbours.
    """
    healthy = iter([host for host in spares if host not in sick])
    return tuple(next(healthy, host) if host in sick else host for host in hosts)


def describe_exchange(before: Sequence[str], after: Sequence[str]) -> str:
    """Say which nodes have been replaced; empty if none has."""
    pairs = [(one, two) for one, two in zip(before, after, strict=True) if one != two]
    if not pairs:
        return ""
    spares, names = (name_some([pair[place] for pair in pairs], MAX_NAMED) for place in (1, 0))
    return f"spare {spares} takes the place of {names}"
