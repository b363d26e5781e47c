"""What the tensors of a program take over its steps: each allocation, from its birth to its death.

Sizes are those of storages, rounded up as CUDA's allocator rounds them. The composition of the peak is worked
out at the end, so that an allocation that turns out to be a gradient was one from its beginning.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

ROUNDING = 512
"""Bytes that CUDA's caching allocator rounds up to (kMinBlockSize)."""


class Allocation:
    """One storage; `died` is None as long as it lives."""

    __slots__ = ("born", "category", "device", "died", "owner", "reference", "size")

    def __init__(self, size: int, device: str, category: str, owner: str, born: int) -> None:
        self.size, self.device, self.category, self.owner, self.born = size, device, category, owner, born
        self.died: int | None = None
        self.reference: object = None


class StepMemory:
    """Every storage of the process that a dispatched operation has made, by kind of device."""

    def __init__(self) -> None:
        self.serial = 0
        """Number of the operation; births and deaths are dated by it."""
        self.log: list[Allocation] = []
        self.living: dict[int, Allocation] = {}
        """By the storage's address in C++."""
        self.totals: dict[str, int] = {}
        self.peaks: dict[str, tuple[int, int]] = {}
        """Bytes, and the operation at whose end they were taken."""
        self.original_resize: Any = torch.UntypedStorage.resize_

    def note_tensor(self, tensor: torch.Tensor, category: str, owner: str) -> None:
        """Note a tensor's storage if it is new, or its size if that has changed."""
        storage = tensor.untyped_storage()
        known = self.living.get(storage._cdata)
        device = tensor.device.type
        size = round_size(storage.nbytes(), device)
        if known is not None:
            if known.size == size:
                return
            category, owner = known.category, known.owner
            self.bury(storage._cdata, known)
        if size and device != "meta":
            self.bear(storage, Allocation(size, device, category, owner, self.serial))

    def bear(self, storage: torch.UntypedStorage, allocation: Allocation) -> None:
        """Begin an allocation."""
        address = storage._cdata
        allocation.reference = weakref.ref(storage, lambda _: self.bury(address, allocation))
        self.living[address] = allocation
        self.log.append(allocation)
        self.totals[allocation.device] = self.totals.get(allocation.device, 0) + allocation.size

    def bury(self, address: int, allocation: Allocation) -> None:
        """End an allocation."""
        if allocation.died is None:
            allocation.died = self.serial
            self.totals[allocation.device] -= allocation.size
            if self.living.get(address) is allocation:
                del self.living[address]

    def end_operation(self) -> None:
        """Take the time of a peak."""
        for device, total in self.totals.items():
            if total > self.peaks.get(device, (0, 0))[0]:
                self.peaks[device] = total, self.serial
        self.serial += 1

    def mark(self, tensor: object, category: str, owner: str = "") -> None:
        """Say what a tensor is, from its storage's beginning on; also within a wrapper such as DTensor."""
        for inner in unwrap_tensor(tensor):
            allocation = self.living.get(inner.untyped_storage()._cdata)
            if allocation is None:
                self.note_tensor(inner, category, owner)
            else:
                allocation.category = category
                allocation.owner = owner or allocation.owner

    def mark_gradient(self, gradient: torch.Tensor, owner: str) -> None:
        """Say that a tensor is a gradient; one in a bucket of DDP's shares that with other modules'."""
        inner = unwrap_tensor(gradient)
        is_shared = any(each.untyped_storage().nbytes() > each.nbytes for each in inner)
        self.mark(gradient, "gradients", "" if is_shared else owner)

    def describe_peak(self, device: str) -> dict[str, Any]:
        """Return the peak of a kind of device: bytes in all, by category, and by module and category."""
        total, serial = self.peaks.get(device, (0, 0))
        categories: dict[str, int] = {}
        modules: dict[str, dict[str, int]] = {}
        for each in self.log:
            if each.device == device and each.born <= serial and (each.died is None or each.died > serial):
                categories[each.category] = categories.get(each.category, 0) + each.size
                own = modules.setdefault(each.owner, {})
                own[each.category] = own.get(each.category, 0) + each.size
        return {"total": total, "categories": categories, "modules": modules}

    def watch_resizes(self) -> None:
        """See `UntypedStorage.resize_`, by which FSDP frees and takes memory; no operation tells of it."""
        original, memory = self.original_resize, self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:  # torch's own
            found = original(storage, size)
            memory.note_resized(storage)
            return found

        storage_class: Any = torch.UntypedStorage
        storage_class.resize_ = resize_

    def note_resized(self, storage: torch.UntypedStorage) -> None:
        """Note the new size of a storage."""
        known = self.living.get(storage._cdata)
        if known is None:
            return
        self.bury(storage._cdata, known)
        if size := round_size(storage.nbytes(), known.device):
            self.bear(storage, Allocation(size, known.device, known.category, known.owner, self.serial))


def round_size(size: int, device: str) -> int:
    """Return the bytes that the allocator takes for these."""
    return size if device == "cpu" else -(-size // ROUNDING) * ROUNDING


def unwrap_tensor(value: object) -> list[torch.Tensor]:
    """Return the tensors with a storage within a value; a wrapper such as DTensor has them as attributes."""
    if not isinstance(value, torch.Tensor):
        return []
    flatten = getattr(type(value), "__tensor_flatten__", None)
    if flatten is None or type(value) in (torch.Tensor, torch.nn.Parameter):
        return [value]
    names, _ = flatten(value)
    return [inner for name in names for inner in unwrap_tensor(getattr(value, name))]
