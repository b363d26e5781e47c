"""Starts what the environment of a rank asks for."""

from collections.abc import Mapping


def start(environ: Mapping[str, str]) -> None:
    """Start the policies; called once, before the program's first line."""
