"""Models and requests for tests, by their fields as the JSON of a plan has them."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.codec import convert
from launcher.fit.training import Training

DATA = Path(__file__).parents[1] / "data"
SETTINGS: dict[str, Any] = json.loads((DATA / "published_settings.json").read_text())
"""Trainings that are known to run, or to run out of memory, on given GPUs, each with its source."""
TABLES: dict[str, Any] = tomllib.loads((DATA / "fit_tables.toml").read_text())
H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559, "nvlink_domain": 8}
NODE = {"cores": 112, "memory_kib": 2 << 30, "shm_kib": 1 << 30, "num_workers": 2}


USUAL = {"framework": "ddp", "precision": "mixed", "checkpointing": "none", "seq_len": 2048}
USUAL |= {"micro_batch": 1, "accumulation": 1, "compile": None, "optimizer_fused": None}
WRITTEN = ("tokens", "step_seconds", "global_batch")
"""Settings that tests write beside the others."""


def sort_parts(parts: dict[str, Any]) -> dict[str, Any]:
    """Parts as a request has them: tests write a framework among the settings, and no adapter as None."""
    found = {**parts, "layout": {**parts.get("layout", {})}, "settings": {**parts.get("settings", {})}}
    settings = found["settings"]
    settings |= {name: found.pop(name) for name in WRITTEN if name in found}
    if settings.get("lora", True) is None:
        del settings["lora"]
    if "framework" in settings:
        found["layout"]["framework"] = settings.pop("framework")
    if "expandable_segments" in settings:
        found["expandable_segments"] = settings.pop("expandable_segments")
    return found


def ask(model: str | dict[str, Any] = "llama7b", each: int | None = None, **parts: Any) -> Training:
    """A training of a user's program on H100, on as many nodes as its layout needs."""
    fields = sort_parts({"device": H100, **parts, "settings": {**USUAL, **parts.get("settings", {})}})
    split = {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "zero": 0, **fields["layout"]}
    size = split["tp"] * split["pp"] * split["cp"] * split["dp"]
    gpus = each or min(8, size)
    fields = {"gpus_per_node": gpus, "nodes": max(1, size // gpus), **fields, "layout": split}
    dimensions = SETTINGS["models"][model] if isinstance(model, str) else model
    return convert(Training, {"model": {"name": "any", **dimensions}, **fields})


MODELS = {name: ask(name).model for name in SETTINGS["models"]}
LLAMA7B = MODELS["llama7b"]
REQUEST = ask(layout={"dp": 8}, settings={"micro_batch": 8, "seq_len": 4096}, node=NODE)


def change(request: Training, row: dict[str, Any]) -> Training:
    """A request with fields of its parts changed; a model that a row names is taken first."""
    parts = sort_parts(row)
    for name, value in parts.items():
        if isinstance(value, dict):
            own = MODELS.get(value.get("name", "")) if name == "model" else None
            parts[name] = replace(own or getattr(request, name), **value)
    return replace(request, **parts)
