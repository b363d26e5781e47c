"""Whether a command line is for a sweep; Hydra is only loaded if its settings may say so."""

from collections.abc import Sequence

from launcher.config.hydra_flags import Flags
from launcher.config.overrides import read_key
from launcher.errors import UsageError


def asks_sweep(flags: Flags, verb: str) -> bool:
    """Tell whether a command line is for a sweep: by `-m`, else `hydra.mode` (in a file, for runs only)."""
    if flags.multirun or flags.run:
        return flags.multirun
    modes = [word for word in flags.overrides if read_key(word) == "hydra.mode"]
    if modes:
        return modes[-1].rpartition("=")[2].strip("'\"") == "MULTIRUN"
    if verb != "run" or not (mentions_hydra(flags.overrides) or flags.sources.mentions("hydra")):
        return False
    from launcher.config.composition import add_searchpath
    from launcher.config.multirun import read_multirun

    sources = add_searchpath(flags.sources, flags.overrides)
    return sources.mentions("MULTIRUN") and read_multirun(sources, flags.overrides).settings.multirun


def mentions_hydra(words: Sequence[str]) -> bool:
    """Tell whether a word of the command line may change or use a setting of Hydra's."""
    return any("hydra" in word for word in words)


def refuse_other_mode(flags: Flags, *, sweep: bool) -> None:
    """Raise UsageError for a word that has no effect on a sweep, or that only a sweep can have."""
    for word in flags.overrides:
        key = read_key(word)
        if not sweep and key.startswith(("hydra.sweep", "hydra/sweeper")):
            raise UsageError(f"{word} goes with -m, for a sweep, and this is a single run")
