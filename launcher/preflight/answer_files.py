"""`RUN_DIR/preflight/ATTEMPT/`: what each node answered (`node-HOST.json`), and the `report.json` of all."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from launcher.codec import load
from launcher.doctor.node_facts import NodeFacts, PreflightReport
from launcher.files import LARGEST, open_below, read_file, write_whole
from launcher.runs.run_directory import closing_descriptor

FOLDER = "preflight"
REPORT = "report.json"
SCHEMA = 1
"""Version of these files."""


def write_preflight_report(run_path: Path, attempt: int, report: PreflightReport) -> None:
    """Write the nodes' answers and the report, each whole or not at all; raises OSError."""
    with closing_descriptor(open_below(run_path, FOLDER, str(attempt))) as at:
        for node in report.nodes:
            write_whole(at, f"node-{name_answer_file(node.host)}.json", dump(asdict(node)))
        values = {key: value for key, value in asdict(report).items() if key != "nodes"}
        write_whole(at, REPORT, dump({**values, "sick": list(report.sick)}))


def dump(value: dict[str, object]) -> bytes:
    """Return a file's content."""
    return (json.dumps({"schema": SCHEMA, **value}, indent=1) + "\n").encode()


def name_answer_file(host: str) -> str:
    """Return a host's name as part of a file's: it came from the node."""
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in host)[:200]


def read_answers(run_path: Path, attempt: int) -> tuple[NodeFacts, ...]:
    """Read what the nodes answered, by their ranks; what cannot be read is left out."""
    return tuple(sorted(read_each(run_path, attempt), key=lambda node: (node.node_rank, node.host)))


def read_each(run_path: Path, attempt: int) -> Iterable[NodeFacts]:
    """Give the answers in no order."""
    for path in run_path.glob(f"{FOLDER}/{attempt}/node-*.json"):
        try:
            yield load(NodeFacts, read_file(path, LARGEST))
        except (OSError, ValueError):
            continue
