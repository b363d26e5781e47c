"""Uses CUDA for the first time, which is when torch reads the allocator's settings; prints the backend."""

import torch

values = torch.ones(1 << 20, device="cuda")
pinned = torch.ones(1 << 10).pin_memory()
total = (values[: 1 << 10] + pinned.to("cuda", non_blocking=True)).sum().item()
assert total == 2 << 10, total
print(torch.cuda.get_allocator_backend())
