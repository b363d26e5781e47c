"""Imports a module of the user's that is named as the launcher's package."""

import torch

import launcher

print(launcher.NAME, torch.ones(1))
