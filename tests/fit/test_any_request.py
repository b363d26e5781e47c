"""Whatever passes the arithmetic has memory, speed and advice: no traceback, nothing negative."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.fit.advice import advise, estimate_speed
from launcher.fit.memory import estimate_memory
from launcher.fit.training import Device, ParallelLayout, Training, TrainingSettings, check_layout
from tests.fit.published_settings import DEEPSEEK, GPT2, LLAMA70B, MIXTRAL
from tests.fuzzing import WORDS

counts = st.sampled_from([1, 2, 3, 7, 10**5, 10**12])
layouts = st.builds(
    ParallelLayout,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([2, 8, 64]),
    cp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    virtual_stages=st.integers(1, 2),
)
trainings = st.builds(
    TrainingSettings,
    framework=st.sampled_from(WORDS["parallel.framework"]),
    precision=st.sampled_from(WORDS["fit.precision"]),
    optimizer=st.sampled_from(WORDS["fit.optimizer"]),
    checkpointing=st.sampled_from(WORDS["fit.checkpointing"]),
    offload=st.sampled_from(WORDS["fit.offload"]),
    micro_batch=counts,
    accumulation=counts,
    seq_len=st.sampled_from([16, 1024, 1 << 20, 10**12]),
    flash_attention=st.booleans(),
    bundled=st.booleans(),
)
DEVICES = [
    Device("NVIDIA H100 80GB HBM3", 81559, nvlink_domain=8),
    Device("CPU", 1000, kind="cpu"),
    Device("x", 0),
]
requests = st.builds(
    Training,
    model=st.sampled_from([LLAMA70B, MIXTRAL, GPT2, DEEPSEEK]),
    layout=layouts,
    settings=trainings,
    device=st.sampled_from(DEVICES),
    gpus_per_node=st.just(2),
    tokens=st.none() | st.floats(1, 1e20),
    step_seconds=st.none() | st.floats(1e-300, 1e20),
)


@given(requests)
def test_what_is_taken_has_memory_speed_and_advice(found: Training) -> None:
    request = replace(found, nodes=found.layout.world_size // 2)
    try:
        check_layout(request)
    except UsageError:
        return
    estimate, speed = estimate_memory(request), estimate_speed(request)
    assert all(0 <= part.bytes.low <= part.bytes.expected <= part.bytes.high for part in estimate.parts)
    assert estimate.total.low > 0 and speed.flops_per_step > 0
    pairs = (speed.step_seconds, speed.mfu, speed.hfu, speed.tflops, speed.total_seconds, speed.gpu_hours)
    assert all(pair is None or 0 <= pair[0] <= pair[1] for pair in pairs)
    assert all(one.what and one.level in ("warning", "note") for one in advise(request))
