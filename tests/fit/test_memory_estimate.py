"""Memory estimates: their shape, published figures, and what must hold for any setting."""

from launcher.fit.fit_model import (
    Device,
    FitRequest,
    ModelDimensions,
    ParallelLayout,
    TrainingSettings,
)
from launcher.fit.memory_estimate import estimate_memory

LLAMA_7B = ModelDimensions("llama7b", 32000, 32, 4096, 32, 32, 128, 11008, 4096)
H100 = Device("H100", 81559)


def test_parts_add_up() -> None:
    request = FitRequest(LLAMA_7B, ParallelLayout(dp=8, zero=3), TrainingSettings("fsdp"), H100, 8)
    estimate = estimate_memory(request)
    assert estimate.total.expected == sum(part.bytes.expected for part in estimate.parts)
