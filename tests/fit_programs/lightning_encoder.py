"""Lightning with torch's own TransformerEncoder, whose fast path looks at devices."""

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, VOCABULARY = 256, 1000


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 1024, batch_first=True), 4)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        (tokens,) = batch
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=self.device)
        out = self.head(self.encoder(self.embedding(tokens), mask, is_causal=True))
        loss = F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("val", self.training_step(batch, 0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


data = DataLoader(TensorDataset(torch.randint(VOCABULARY, (256, 128))), 16, num_workers=2)
trainer = lightning.Trainer(
    max_steps=4, precision="bf16-mixed", devices=1, gradient_clip_val=1.0, log_every_n_steps=1
)
trainer.fit(Module(), data, data)
