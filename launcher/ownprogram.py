"""What a configuration in the working directory brings that runs: told before it does."""

from collections.abc import Iterator, Sequence

from launcher.job import Draft
from launcher.launch.program import BUNDLED
from launcher.runs.secrets import mask_words
from launcher.terminal import join_words
from launcher.wording import say

LOADED = ("LD_AUDIT", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "PYTHONHOME", "PYTHONPATH", "PYTHON_EXEC")
"""Variables that have other code run than the program's own."""


def tell_program(drafts: Sequence[Draft], own_files: Sequence[str]) -> None:
    """Say what of the user's configuration files is to be run; nothing for what is on the command line."""
    brought = dict.fromkeys(each for draft in drafts for each in list_brought(draft)) if own_files else {}
    if brought:
        say(f"{', '.join(own_files)} has this run: {'; '.join(brought)}")


def list_brought(draft: Draft) -> Iterator[str]:
    """Give what the configuration says to run, and the command line does not."""
    config, given = draft.config, draft.composed.given
    command = config.program.get("command")
    configured = draft.words is None and "program.command" not in given
    if configured and isinstance(command, list) and command != list(BUNDLED):
        yield join_words(mask_words([str(word) for word in command]))
    for name in LOADED:
        keys = {"env", f"env.{name}", *(["env.from_file"] if name in draft.loaded else ())}
        if name in config.env and not given & keys:
            yield join_words([f"{name}={config.env[name]}"])
    if "cluster.setup" not in given and draft.cluster.kind == "slurm":
        yield from (f"cluster.setup: {line}" for line in config.cluster.setup)
