"""torchrun's command line, rendered from values."""

from collections.abc import Mapping, Sequence

MODULE = "torch.distributed.run"
"""What the `torchrun` script runs."""


def render_torchrun(
    python: str, options: Mapping[str, object], shim: Sequence[str], program: Sequence[str]
) -> tuple[str, ...]:
    """Return the agent's command: torchrun's options, then the shim, then the program's words as they are.

    An option that is None is left out, so that torchrun takes it from `PET_*` or its own default. As with
    the `torchrun` script, a `json.py` in the working directory is not what the agent imports (-P). Without
    the `--`, argparse (of Python 3.13.0 too) looks for torchrun's options among the program's words, and
    refuses `--log=x`, which may be short for two of them.
    """
    rendered = [
        f"--{name.replace('_', '-')}={render_option_value(value)}"
        for name, value in options.items()
        if value is not None and value != {}
    ]
    return (python, "-P", "-m", MODULE, *rendered, "--no-python", "--", *shim, *program)


def render_option_value(value: object) -> str:
    """Write a value as torchrun reads it; a mapping is `key=value,key=value` (its `--rdzv-conf`)."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return str(value)


def parse_pairs(text: str) -> dict[str, str]:
    """Read torchrun's `key=value,key=value`, as in `PET_RDZV_CONF`."""
    pairs = (piece.partition("=") for piece in text.split(",") if piece)
    return {key.strip(): value.strip() for key, _, value in pairs}
