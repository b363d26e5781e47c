"""What Hydra prints by itself: `--cfg`, `--info`, `--hydra-help` and shell completion."""

import io
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from hydra.core.global_hydra import GlobalHydra

from launcher.config.compose import (
    FAILURES,
    add_searchpath,
    diagnose_failure,
    normalize_overrides,
    open_hydra,
)
from launcher.config.hydra_flags import Flags, make_parser
from launcher.config.mistakes import shorten_message
from launcher.config.sources import Sources
from launcher.errors import UsageError
from launcher.text import print_text


def show_flags(flags: Flags) -> int:
    """Show what `--cfg`, `--info` or `--hydra-help` ask for, as Hydra does; raises UsageError."""
    name = flags.sources.primary
    sources = add_searchpath(flags.sources, flags.overrides)
    words = normalize_overrides(sources, flags.overrides)
    output = io.StringIO()
    with open_hydra(sources) as loader, redirect_stdout(output), redirect_stderr(io.StringIO()):
        hydra: Any = GlobalHydra.instance().hydra
        try:
            if flags.cfg:
                hydra.show_cfg(name, words, flags.cfg, flags.package, flags.resolve)
            elif flags.info:
                hydra.show_info(flags.info, name, words)
            else:
                parser = make_parser()  # Hydra's help describes this argument
                parser.add_argument("overrides", nargs="*", help="KEY=VALUE, to override the configuration")
                hydra.hydra_help(name, parser, Namespace(overrides=[]))
        except FAILURES as error:
            raise UsageError(diagnose_failure(loader, sources, words, error)) from None
        except SystemExit:  # Hydra's exit if there is no such package
            raise UsageError(
                f"the configuration has nothing at {flags.package!r}: see `launch --cfg {flags.cfg}`"
            ) from None
    print_text(output.getvalue())
    return 0


def ask_completion(sources: Sources, request: str, words: Sequence[str] = ()) -> str:
    """Return what Hydra's shell completion prints for `install=bash`, or for a query of these words.

    Raises UsageError for a shell that it does not know, or for words that it cannot read.
    """
    sources = add_searchpath(sources, words)
    *before, last = words or [""]
    # Hydra takes the line from the environment, splits it at white space, and answers on stdout.
    whole = [word for word in normalize_overrides(sources, before) if len(word.split()) == 1]
    line = " ".join(["launch", *whole, last])
    output = io.StringIO()
    try:
        with (
            open_hydra(sources),
            borrow_variable("COMP_LINE", line),
            redirect_stdout(output),
        ):
            hydra: Any = GlobalHydra.instance().hydra
            hydra.shell_completion(sources.primary, [request])
    except FAILURES as error:
        raise UsageError(f"{request}: {shorten_message(error)}") from None
    return output.getvalue()


@contextmanager
def borrow_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
