"""`launch report`: a run as one HTML page that needs nothing else, neither network nor scripts."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from launcher.report.html_charts import DRAWS
from launcher.report.html_figures import CPU, GPU, make_resources, make_steps
from launcher.report.html_hangs import make_hangs
from launcher.report.html_page import Page, Section, render_page
from launcher.report.html_placement import HostPlan, make_placement
from launcher.report.html_sections import TONES, describe_run_end, make_attempts, make_summary
from launcher.report.html_time_shares import make_times
from launcher.report.html_warnings import make_warnings
from launcher.report.run_account import RunAccount
from launcher.text import clean_text

MISSING = {
    "warnings": "Warnings: there were none.",
    "placement": "Where the ranks ran: there is no plan-HOST.json and no record of a rank.",
    "steps": "Step time: no rank reported a step (watch.enabled, watch.metrics_interval).",
    "time": "Where the time went: no node reported over time (watch.enabled, watch.metrics_interval).",
    "gpu": "GPU: no rank reported one.",
    "cpu": "CPU and memory: no node reported over time (watch.enabled, watch.metrics_interval).",
    "hangs": "Hangs: none was found.",
    "attempts": "Attempts: the run has not begun, or its manifest.json cannot be read.",
}
"""Why a section is left out."""
UNDRAWN = (
    "Charts: matplotlib is not installed (pip install 'launch-ranks[report]'); their figures are in tables."
)


def render_report(account: RunAccount, hosts: Sequence[HostPlan]) -> bytes:
    """Return the page of a run, UTF-8; `hosts` are the plans that can be read."""
    sections = list(make_sections(account, hosts))
    status = account.status
    page = Page(
        title=clean_text(status.run, 200),
        state=status.state,
        tone=TONES.get(status.state, "calm"),
        lead=describe_run_end(account),
        sections=tuple(section for section in sections if has_content(section)),
        left_out=(*list_left_out(sections), *([] if DRAWS else [UNDRAWN]), *account.notes),
        foot=f"Written by launch report at {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}.",
    )
    return render_page(page)


def make_sections(account: RunAccount, hosts: Sequence[HostPlan]) -> Iterator[Section]:
    """Give all sections in their order, empty ones too."""
    yield make_summary(account)
    yield make_warnings(account, hosts)
    yield make_hangs(account)
    yield make_steps(account)
    yield make_times(account)
    yield make_resources(account, "gpu", "GPU", GPU)
    yield make_resources(account, "cpu", "CPU and memory", CPU)
    yield make_placement(account, hosts)
    yield make_attempts(account)


def has_content(section: Section) -> bool:
    """Tell whether a section has anything to show."""
    return any(
        (section.text, section.facts, section.findings, section.figures, section.tables, section.hangs)
    )


def list_left_out(sections: Sequence[Section]) -> Iterator[str]:
    """Say of each section without content why it is left out."""
    for section in sections:
        if not has_content(section) or (section.name == "steps" and not section.figures):
            yield MISSING[section.name]
