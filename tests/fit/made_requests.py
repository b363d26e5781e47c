"""Models and requests for tests."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.fit.training import (
    Device,
    Experts,
    LatentAttention,
    ModelDimensions,
    NodeResources,
    ParallelLayout,
    Training,
    TrainingSettings,
    find_framework,
)

DATA = Path(__file__).parents[1] / "data"
SETTINGS: dict[str, Any] = json.loads((DATA / "published_settings.json").read_text())
"""Trainings that are known to run, or to run out of memory, on given GPUs, each with its source."""
TABLES: dict[str, Any] = tomllib.loads((DATA / "fit_tables.toml").read_text())


def read_model(fields: dict[str, Any]) -> ModelDimensions:
    fields = dict(fields)
    for name, kind in (("experts", Experts), ("latent_attention", LatentAttention)):
        if fields.get(name):
            fields[name] = kind(**fields[name])
    return ModelDimensions(**fields)


MODELS = {name: read_model(fields) for name, fields in SETTINGS["models"].items()}
LLAMA7B = MODELS["llama7b"]
H100 = Device("NVIDIA H100 80GB HBM3", 81559, nvlink_domain=8)
NODE = NodeResources(cores=112, memory_kib=2 << 30, shm_kib=1 << 30, num_workers=2)
REQUEST = Training(
    LLAMA7B,
    ParallelLayout(dp=8),
    TrainingSettings(micro_batch=8, seq_len=4096),
    H100,
    gpus_per_node=8,
    node=NODE,
    is_bundled=False,
)


def make_request(layout: ParallelLayout, settings: TrainingSettings = REQUEST.settings) -> Training:
    """LLaMA 7B on nodes of eight H100, split and set up like this."""
    settings = replace(settings, framework=find_framework(layout))
    return replace(REQUEST, layout=layout, settings=settings, nodes=max(1, layout.world_size // 8))


def change(request: Training, row: dict[str, Any]) -> Training:
    """A request with fields of its parts changed; a model that a row names is taken first."""
    parts = dict(row)
    for name, value in row.items():
        if isinstance(value, dict):
            own = MODELS.get(value.get("name", "")) if name == "model" else None
            parts[name] = replace(own or getattr(request, name), **value)
    return replace(request, **parts)
