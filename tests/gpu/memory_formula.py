"""A simple sum for the GPU memory of training, for a measured figure to be compared with.

It belongs to the proof alone: the launcher itself does not predict memory.
"""

from dataclasses import dataclass

from launcher.programs.options import ModelConfig

STATE_BYTES = 18
"""A parameter under mixed-precision AdamW: weights 6, gradients 4, moments 8 (ZeRO, arXiv:1910.02054, and S.
Bekman's Machine Learning Engineering Open Book)."""
LAYER_BYTES = 34
"""A layer's activations for each element of the residual stream, but for the matrix of attention weights,
which flash attention does not keep: the term sbh * 34 of arXiv:2205.05198, equation 1."""
LOGIT_BYTES = 6 + 4
"""A logit in 16 and 32 bits, and the gradient of the latter."""


def count_parameters(model: ModelConfig) -> int:
    """Count the parameters of the bundled program's model."""
    import torch

    from launcher.programs.transformer import Transformer

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(model).parameters())


@dataclass(frozen=True, slots=True)
class Predicted:
    """Parts of the memory, in bytes."""

    states: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """What the tensors take; CUDA's context and what lies fallow come on top."""
        return self.states + self.activations + self.logits


def predict_memory(model: ModelConfig, batch_size: int, seq_len: int) -> Predicted:
    """Predict the memory of one rank that trains `batch_size` sequences of `seq_len` tokens, unsharded."""
    tokens = batch_size * seq_len
    return Predicted(
        states=STATE_BYTES * count_parameters(model),
        activations=LAYER_BYTES * tokens * model.hidden_size * model.layers,
        logits=LOGIT_BYTES * tokens * model.vocab_size,
    )
