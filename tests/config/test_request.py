"""The planner's request, made from the configuration."""

from launcher.config.request import make_request
from launcher.config.settings import Settings


def test_each_setting_reaches_the_planner() -> None:
    config = Settings(nproc_per_node=3, devices="own", env={"OMP_NUM_THREADS": "5", "API_TOKEN": "sesame"})
    config.allocator = {"max_split_size_mb": 64, "host": "jemalloc"}
    environ = {**config.env, "NCCL_DEBUG": "INFO", "CUDA_HOME": "/cuda", "HOME": "/home/me"}
    found = make_request(config, environ, caches="/tmp/caches")
    assert (found.nproc_per_node, found.devices, found.caches) == (3, "own", "/tmp/caches")
    for section in ("binding", "dataloader", "gc", "allocator"):
        assert getattr(found, section) is getattr(config, section)
    assert found.environ == {"OMP_NUM_THREADS": "5", "NCCL_DEBUG": "INFO"}
    assert found.configured["OMP_NUM_THREADS"] == "5" and "sesame" not in found.configured["API_TOKEN"]
    assert found.host_library is None, "it is looked for on the node"
