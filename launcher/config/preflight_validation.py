"""The check of `preflight.*`."""

import math
from typing import TYPE_CHECKING

from launcher.errors import UsageError

if TYPE_CHECKING:
    from launcher.config.settings import PreflightConfig


def check_preflight_settings(preflight: "PreflightConfig") -> None:
    """Raise UsageError for settings that mean nothing."""
    if not all(preflight.paths):
        raise UsageError(f"preflight.paths={','.join(preflight.paths)}: an entry is empty, leave it out")
    if not 0 <= preflight.min_free_gib < math.inf:
        raise UsageError(
            f"preflight.min_free_gib={preflight.min_free_gib:g}: give a number of GiB, at least 0"
        )
    if not 0 < preflight.tolerance <= 1:
        raise UsageError(
            f"preflight.tolerance={preflight.tolerance:g}: give a share of the median, above 0 and at most 1"
        )
