"""Training programs that wait for data, as users write them: those of `programs.toml`."""

import tomllib
from pathlib import Path

from tests.inprocess.hooked import WITHOUT_COMPILER

_TEXTS = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())
LOADING, _TRAINING, _ALONE, BATCHES = (
    _TEXTS[name].replace("WITHOUT_COMPILER", WITHOUT_COMPILER)
    for name in ("loading", "training", "alone", "batches")
)
TRAINING, ALONE = LOADING + _TRAINING, LOADING + _ALONE
