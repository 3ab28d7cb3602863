"""Lesson 10. The free list as tensors on the device: slots are allocated and freed without a loop over them.

A free list in Python hands out numbers one by one, and each has to be copied to the device before a kernel can use it.
Here the list is an int32 tensor on the device, and allocating n slots is a slice of it.

    free_slots     handed out from the front, in order
    release_slots  freed since; merged into free_slots, and sorted, only when free_slots alone is too short
    deferred       freed within an open free group; not available until it ends

Concatenating tensors copies them. So a free is appended to the short list, never to the long one, and a group of frees
is appended once.

With a page_size above 1, slots are allocated and freed in whole pages of `page_size` neighbours. Page 0 is padding, as
block 0 is from lesson 3 on: its slots are never handed out, and padding rows write there.

Names and lists are those of SGLang (Zheng et al., 2024) and pymllm.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mini_engine.base.errors import OutOfBlocks, UserError


class TokenToKVPoolAllocator:
    """Allocates slots of a pool as `[n]` int32 tensors. Each slot is free, held or deferred.

    Args:
        size: slots that can be handed out: page_size … page_size + size - 1.
        page_size: slots per page; 1 for single slots.
        need_sort: sort when the lists are merged, so that low slots go first and neighbours stay together.

    Attributes:
        is_held: `[num_slots]` bool, on the device: the slots that may be freed.
    """

    def __init__(
        self, size: int, page_size: int = 1, *, device: str | torch.device = "cpu", need_sort: bool = True
    ) -> None:
        if page_size < 1 or size < page_size or size % page_size:
            raise UserError(
                f"{size} slots cannot be divided into pages of {page_size}; "
                "use a page size of at least 1 and a multiple of it as the number of slots"
            )
        self.size = size
        self.page_size = page_size
        self.device = torch.device(device)
        self.need_sort = need_sort
        self.open_groups = 0
        self.clear()

    @property
    def num_slots(self) -> int:
        """The slots that the pool must have: `size` and the padding page."""
        return self.size + self.page_size

    @property
    def num_deferred(self) -> int:
        """The number of slots freed within the open group: neither free nor held until it ends."""
        return sum(map(len, self.deferred))

    def available_size(self) -> int:
        """Return the number of slots that `alloc` can hand out now, without those freed within an open group."""
        return len(self.free_slots) + len(self.release_slots)

    def clear(self) -> None:
        """Free every slot, held or not; an open group forgets its deferred slots."""
        slots = torch.arange(self.page_size, self.num_slots, dtype=torch.int32, device=self.device)
        self.free_slots, self.release_slots = slots, slots[:0]
        self.is_held = torch.zeros(self.num_slots, dtype=torch.bool, device=self.device)
        self.deferred: list[Tensor] = []

    def alloc(self, need_size: int) -> Tensor:
        """Allocate `need_size` slots, `[need_size]` int32. Each run of page_size of them is one page, in order.

        Raises:
            OutOfBlocks: fewer are available; nothing was changed.
            ValueError: need_size is negative or not a multiple of page_size; nothing was changed.
        """
        if need_size < 0 or need_size % self.page_size:
            raise ValueError(
                f"cannot allocate {need_size} slots; need_size must be 0 or more and a multiple of {self.page_size}"
            )
        if need_size > self.available_size():
            waiting = f", {self.num_deferred} wait for a free group to end" if self.deferred else ""
            raise OutOfBlocks(f"need {need_size} slots, {self.available_size()} free of {self.size}{waiting}")
        if need_size > len(self.free_slots):
            self.merge_and_sort_free()
        slots, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        self.is_held[slots] = True
        return slots

    def free(self, indices: Tensor) -> None:
        """Free the slots `indices`, int32 or int64: whole pages, in any order and shape. The tensor is not kept.

        On a GPU the check makes the host wait for the device, once per call.

        Raises:
            ValueError: a slot occurs twice or is not held, or a page is not complete; nothing was changed.
        """
        if not indices.numel():
            return
        slots = indices.flatten().sort().values  # a copy: the caller may overwrite its own at once
        self._check(slots)
        slots = slots.to(torch.int32)
        self.is_held[slots] = False
        if self.open_groups:
            self.deferred.append(slots)
        else:
            self.release_slots = torch.cat((self.release_slots, slots))

    def merge_and_sort_free(self) -> None:
        """Move the slots of release_slots into free_slots: behind the others, or all sorted if need_sort.

        Both lists remain int32 tensors on their device, and release_slots is empty afterwards.
        """
        self.free_slots = torch.cat((self.free_slots, self.release_slots))
        self.release_slots = self.free_slots[:0]
        if self.need_sort:
            self.free_slots = self.free_slots.sort().values

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """Collect the frees within this context; at its end append them all to release_slots, in one concatenation.

        Groups may be nested: only the end of the outermost one appends. It does so even if the group ends with an
        exception, which is passed on. A `clear` within the group leaves nothing to append.
        """
        self.open_groups += 1
        try:
            yield
        finally:
            self.open_groups -= 1
            if self.deferred and not self.open_groups:
                self.release_slots = torch.cat((self.release_slots, *self.deferred))
                self.deferred = []

    def _check(self, slots: Tensor) -> None:
        """Raise ValueError unless `slots`, sorted, may be freed. All checks share one wait for the device."""
        if slots.dtype not in (torch.int32, torch.int64) or len(slots) % self.page_size:
            raise ValueError(
                f"{len(slots)} slots as {slots.dtype} are not whole pages of {self.page_size}; "
                "free all slots of a page in one call, as int32 or int64"
            )
        last = self.num_slots - 1
        inside = slots.clamp(0, last)  # negative ones become slot 0, which is never held
        not_held = (slots > last) | ~self.is_held[inside]
        twice = slots[1:] == slots[:-1]
        torn = slots != self._whole_pages(slots)
        if not torch.cat((not_held, twice, torn)).any():
            return
        if not_held.any():
            which = slots[not_held].unique().tolist()
            raise ValueError(f"slots {which} are not held; they are already free or were never allocated")
        if twice.any():
            raise ValueError(f"slots {slots[1:][twice].unique().tolist()} occur twice; each can be freed only once")
        raise ValueError(f"slots {slots.tolist()} are not whole pages of {self.page_size}; free a page in one call")

    def _whole_pages(self, slots: Tensor) -> Tensor:
        """Return the slots of the complete pages that every page_size-th of `slots` belongs to."""
        size = self.page_size
        firsts = slots[::size] // size * size
        return (firsts[:, None] + torch.arange(size, dtype=slots.dtype, device=slots.device)).flatten()
