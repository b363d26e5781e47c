"""A module beside the programs, with a relative data file."""

from pathlib import Path

TEXT = Path("data.txt").read_text() + Path(__file__).with_name("data.txt").read_text()
