"""The variables of the ranks as a table for people: what each is, and who set it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from launcher.plan.model import RankPlan, Variable
from launcher.text import count_things, escape_text, shorten_cpulist

SOURCES = {"plan": "the plan", "configuration": "the configuration", "user": "you"}
LONGEST = 500
"""Characters of a value that are shown."""


def print_variables(console: Console, ranks: Sequence[RankPlan]) -> None:
    """Print a row for each variable; one that ranks have with several values has a row for each of these."""
    groups = group_variables(ranks)
    alike = all(len(owners) == len(ranks) for owners in groups.values())
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("variable", no_wrap=console.width > 60)
    table.add_column("value", overflow="fold")
    if not alike:
        table.add_column("ranks")
    table.add_column("set by", no_wrap=True)
    table.add_column("why")
    for variable, owners in groups.items():
        who = "all" if len(owners) == len(ranks) else shorten_cpulist(owners)
        source = SOURCES.get(variable.source, variable.source)
        texts = [escape_text(text, LONGEST) for text in (variable.name, variable.value, variable.why)]
        table.add_row(*texts[:2], *([] if alike else [who]), source, texts[2])
    if groups:
        console.print(table, markup=False)


def group_variables(ranks: Sequence[RankPlan]) -> Mapping[Variable, list[int]]:
    """The local ranks that have each variable with a value, in the order of the names."""
    groups: dict[Variable, list[int]] = {}
    for rank in ranks:
        for variable in rank.variables:
            groups.setdefault(variable, []).append(rank.local_rank)
    return {
        variable: groups[variable] for variable in sorted(groups, key=lambda one: (one.name, groups[one]))
    }


def count_variables(ranks: Sequence[RankPlan]) -> str:
    """How many variables there are by who set them, and how to see them; empty where there are none."""
    names = {(variable.source, variable.name) for rank in ranks for variable in rank.variables}
    counts = Counter(source for source, _ in names)
    parts = [f"{counts[source]} by {who}" for source, who in SOURCES.items() if counts[source]]
    total = count_things(sum(counts.values()), "variable")
    return f"{total} set: {', '.join(parts)} (explain=true lists them)" if parts else ""
