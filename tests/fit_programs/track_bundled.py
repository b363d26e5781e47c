"""The bundled program's model and steps under torch's own MemTracker, in-process: `… BATCH SEQ [recompute]`.

Prints the peak in bytes on the CPU. It knows nothing of `launch fit`.
"""

import sys

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from launcher.programs.options import ModelConfig
from launcher.programs.training import make_optimizer
from launcher.programs.transformer import Transformer


def compute_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


def main() -> None:
    batch, length = int(sys.argv[1]), int(sys.argv[2])
    recompute = "full" if "recompute" in sys.argv else "none"
    with FakeTensorMode(), (tracker := MemTracker()):
        model = Transformer(ModelConfig(), recompute=recompute)
        optimizer = make_optimizer(model, 1e-3, 0.1)
        for _ in range(2):
            tracker.reset_mod_stats()
            tokens = torch.zeros(batch, length + 1, dtype=torch.uint8).long()
            loss = compute_loss(model, tokens)
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del loss, tokens
        peak = tracker.get_tracker_snapshot("peak")
    print(peak[torch.device("cpu")]["Total"])


main()
