"""What the tables of a recorded run's page have."""

import json
import tempfile
from pathlib import Path

from tests.report.test_page import TABLES, read_tables, render
from tests.runs.recordings import restore


def write_tables() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = read_tables(render(restore("full", Path(folder))))
    rows = {name: ",\n  ".join(json.dumps(row) for row in rows) for name, rows in found.items()}
    sections = ",\n ".join(f'"{name}": [\n  {text}\n ]' for name, text in rows.items())
    TABLES.write_text(f"{{\n {sections}\n}}\n")
