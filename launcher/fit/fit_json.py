"""The JSON form of a FitReport, as `launch plan format=json` has it under `fit`."""

from dataclasses import asdict

from launcher.fit.choose_settings import describe_choice
from launcher.fit.fit_model import FitReport


def fit_to_json(report: FitReport) -> dict[str, object]:
    """Return a report as JSON has it; keys are only ever added. Bytes are integers, times are seconds."""
    request, estimate = report.request, report.estimate
    return {
        "verdict": report.verdict,
        "capacity": report.capacity,
        "headroom": report.capacity - estimate.total.expected,
        "memory": {
            "parts": [
                {"name": part.name, **asdict(part.bytes), "note": part.note} for part in estimate.parts
            ],
            "total": asdict(estimate.total),
            "allocated": asdict(estimate.allocated),
            "reserved": asdict(estimate.reserved),
            "stage": estimate.stage,
        },
        "model": asdict(request.model),
        "layout": {**asdict(request.layout), "world_size": request.layout.world_size},
        "settings": asdict(request.settings),
        "device": asdict(request.device),
        "nodes": request.nodes,
        "ranks_per_node": request.gpus_per_node,
        "is_bundled": request.is_bundled,
        "chosen": describe_choice(request, estimate.total) if request.free.any else "",
        "changes": [asdict(change) for change in report.changes],
        "budget": [asdict(line) for line in report.budget],
        "advice": [asdict(item) for item in report.advice],
        "speed": asdict(report.speed) if report.speed else None,
        "learned": report.learned,
        **({"grid": [asdict(cell) for cell in report.grid]} if report.grid else {}),
    }
