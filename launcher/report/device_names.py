"""GPUs and NICs in words."""

from launcher.plan.model import Gpu, Nic
from launcher.text import clean_text, count_things, format_size


def describe_gpu(gpu: Gpu) -> tuple[str, ...]:
    """What is known of a GPU: its product name, memory, MIG instances."""
    memory = format_size(gpu.memory_mib * 1024) if gpu.memory_mib else ""
    mig = count_things(len(gpu.mig), "MIG instance") if gpu.mig else ""
    name = clean_text(gpu.name) or ("AMD GPU" if gpu.vendor == "amd" else "")
    return tuple(filter(None, (name, memory, mig)))


def describe_nic(nic: Nic) -> tuple[str, ...]:
    """What is known of a NIC: its link with the rate, whether it is up."""
    rate = f"{nic.rate_gbps:g} Gb/s" if nic.rate_gbps else ""
    link = clean_text(f"{nic.link_layer} {rate}")
    state = "active" if link and nic.active else "" if nic.active else "down"
    return tuple(filter(None, (link, state)))
