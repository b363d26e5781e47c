"""Where and how a run computes: device, process group, DDP or FSDP, precision, peak."""

from dataclasses import dataclass

import torch

from launcher.programs.metrics import Peak, choose_peak
from launcher.programs.parallel import Spread, choose_spread
from launcher.programs.process_group import Ranks, choose_device, join, read_ranks
from launcher.programs.training_config import Config


@dataclass(frozen=True, slots=True)
class Place:
    """What was found and chosen."""

    ranks: Ranks
    device: torch.device
    backend: str
    """`nccl` or `gloo`."""
    spread: Spread
    peak: Peak


def find_place(config: Config) -> Place:
    """Choose the device, the spread and the peak, and join the other ranks; raises OptionError."""
    ranks = read_ranks()
    device = choose_device(config.train.device, ranks)
    spread = choose_spread(config, device, ranks.world_size, ranks.local_world_size)
    backend = join(device, ranks)
    # After joining, so that ranks that share cores measure at the same time.
    return Place(ranks, device, backend, spread, choose_peak(config.train.peak_tflops, device, spread.dtype))
