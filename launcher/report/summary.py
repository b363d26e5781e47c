"""The last words on a job: how it went, who failed first, and where everything is."""

from collections.abc import Sequence

from launcher.runs.progress import Progress


def describe_progress(steps: Sequence[Progress]) -> str:
    """Return what rank 0 reported, first to last: `loss 5.55 to 2.41 over 200 steps, 12345 tokens/s …`."""
    if not steps:
        return ""
    first, last = dict(steps[0].metrics), dict(steps[-1].metrics)
    parts = []
    if "loss" in first and "loss" in last:
        parts.append(f"loss {first['loss']} to {last['loss']} over {steps[-1].step} steps")
    best = {name: value for step in steps for name, value in step.metrics}
    parts += [
        f"{best[name]} {unit}"
        for name, unit in (("tokens/s", "tokens/s"), ("tflops", "TFLOPS"))
        if name in best
    ]
    parts += [f"MFU {best['mfu']}"] if "mfu" in best else []
    return ", ".join(parts)


def describe_time(seconds: float) -> str:
    """Return a duration for people: `41.3 s`, `12 min 5 s`, `3 h 20 min`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
