"""Settings of the bundled program whose memory is estimated and tracked."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from launcher.fit.training import Device, ModelDimensions, ParallelLayout, Training, TrainingSettings

H100 = Device("NVIDIA H100 80GB HBM3", 81559)


@dataclass(frozen=True, slots=True)
class FitCase:
    """One setting of the grid."""

    model: str
    parallel: str
    """`none`, `ddp` or `fsdp`."""
    world_size: int
    batch: int
    seq_len: int
    bf16: bool = True
    checkpointing: str = "none"
    optimizer: str = "adamw"
    accumulation: int = 1

    @property
    def label(self) -> str:
        """The row's name in the table."""
        words = [
            self.model,
            self.parallel + (f" over {self.world_size}" if self.world_size > 1 else ""),
            f"{self.batch} x {self.seq_len}",
            "bf16" if self.bf16 else "fp32",
        ]
        words += [f"checkpointing {self.checkpointing}"] if self.checkpointing != "none" else []
        words += [self.optimizer] if self.optimizer != "adamw" else []
        words += [f"{self.accumulation} micro-steps"] if self.accumulation > 1 else []
        return ", ".join(words)


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MODELS = {name: ModelDimensions(name, **fields) for name, fields in TABLES["models"].items()}
GRID, FEW = (tuple(FitCase(**fields) for fields in TABLES[name]) for name in ("grid", "few"))
"""All of them, and a few that an ordinary test can afford."""


def make_request(case: FitCase) -> Training:
    """Make what is asked of the estimate."""
    sharded = case.parallel == "fsdp"
    settings = TrainingSettings(
        framework="fsdp" if sharded else "ddp",
        precision="mixed" if case.bf16 else "fp32",
        optimizer=case.optimizer,
        checkpointing=case.checkpointing,
        micro_batch=case.batch,
        accumulation=case.accumulation,
        seq_len=case.seq_len,
        autocast=case.bf16 and not sharded,
        bundled=True,
    )
    layout = ParallelLayout(dp=case.world_size, zero=3 if sharded else 0)
    return Training(MODELS[case.model], layout, settings, H100, min(8, case.world_size))
