"""PyTorch's allocator settings, from the configuration to what the environment holds."""

from collections.abc import Mapping


def render_allocator(settings: Mapping[str, object]) -> str:
    """Return the settings as PYTORCH_CUDA_ALLOC_CONF has them: `expandable_segments:True`."""
    return ",".join(f"{name}:{render_value(value)}" for name, value in settings.items() if name != "host")


def render_value(value: object) -> str:
    """Return a value in the allocator's notation: `True`, `[256:1,512:2]`."""
    if isinstance(value, list):
        return f"[{','.join(map(render_value, value))}]"
    return str(value)
