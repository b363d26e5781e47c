"""The report's sections of words: summary, warnings with their fixes, placement, attempts."""

from collections.abc import Iterator, Mapping

from launcher.report.html_page import Fact, Head, HtmlTable, Section
from launcher.report.run_account import RunAccount
from launcher.report.run_table import shorten_time
from launcher.runs.manifest import read_time, take_dict, take_list
from launcher.runs.secrets import mask_words
from launcher.text import clean_text, describe_time, join_words

LONGEST = 2000
"""Characters of a text."""
MOST_ROWS = 64
"""Rows of a table."""
TONES = {"succeeded": "good", "failed": "bad", "lost": "bad", "unknown": "bad", "stopped": "fair"}


def describe_run_end(account: RunAccount) -> str:
    """Say in a sentence or two how the run stands or ended."""
    status = account.status
    seconds = account.end - account.begin
    step = f" at step {format_run_step(account)}" if format_run_step(account) else ""
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


def format_run_step(account: RunAccount) -> str:
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
    yield Fact("Ranks", describe_rank_count(account))
    yield Fact("Nodes", clean_text(f"{status.nodes}: {status.nodelist}", 400) if status.nodes else "")
    yield Fact("SLURM job", status.job_id or "")
    yield Fact("Steps", format_run_step(account))
    yield Fact("Exit code", "" if status.exit_code is None else str(status.exit_code))
    yield Fact("Git commit", describe_commit(take_dict(manifest, "git")), is_code=True)
    packages = take_dict(manifest, "packages")
    yield Fact("Versions", clean_text(", ".join(f"{name} {packages[name]}" for name in packages), 400))
    yield from list_failure_facts(account)


def show_time(text: str) -> str:
    """Return a time of the manifest's with its zone, to the second."""
    zone = text[-6:] if text[-6:-5] in ("+", "-") else ""
    return f"{shorten_time(text)} {clean_text(zone)}".strip() if text else ""


def describe_rank_count(account: RunAccount) -> str:
    """Return the number of ranks, as planned or as recorded."""
    planned = sum(len(host.planned) for host in account.records.hosts)
    known = max(planned, len({state.rank for one in account.reports for state in one.ranks}))
    return str(known) if known else ""


def describe_commit(git: Mapping[str, object]) -> str:
    """Return the commit, and whether files had been changed since."""
    commit = clean_text(str(git.get("commit") or ""))
    return f"{commit} with changes that are not committed" if commit and git.get("dirty") else commit


def list_failure_facts(account: RunAccount) -> Iterator[Fact]:
    """Give who failed first, and its last lines."""
    failure = account.status.first_failure
    if failure:
        who = f"rank {failure.get('rank')} on {failure.get('host')} (local rank {failure.get('local_rank')})"
        yield Fact("First failure", clean_text(f"{who} {failure.get('reason')}", LONGEST))
        lines = [clean_text(str(line), 400) for line in take_list(failure, "last_lines")[-30:]]
        yield Fact("Its last lines", "\n".join(lines), is_code=True)


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
