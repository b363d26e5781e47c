"""`python -m pkg`."""

import sys

import torch

from . import helper
from .helper import VALUE

print(__name__, __package__, __spec__.name, sys.argv, sys.path[0], helper.VALUE, VALUE, torch.ones(2).sum())
raise SystemExit(4 if "--fail" in sys.argv else 0)
