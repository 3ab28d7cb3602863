"""Lesson 10. The free list as tensors on the device: slots are taken and given back without a loop over them.

A free list in Python hands out numbers one by one, and each must travel to the device before a kernel can use it. Here
the list is an int32 tensor there, and taking n slots is a slice of it.

    free_slots     handed out from the front, in order
    release_slots  came back since; merged into free_slots, and sorted, only when free_slots alone is too short
    deferred       freed within an open free group; nobody gets them before it ends

Joining tensors copies them. So a free joins the short list, never the long one, and a group of frees joins once.

In page-aligned mode slots come and go in whole pages of `page_size` neighbours. Page 0 is padding, as block 0 is from
lesson 3 on: nobody is given its slots, and rows that only fill up a batch write there.

Names and lists are SGLang's (Zheng et al., 2024) and pymllm's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mini_engine.errors import OutOfBlocks, UserError


class TokenToKVPoolAllocator:
    """Hands out slots of a pool as `[n]` int32 tensors. Free, held and deferred slots are together all of them.

    Args:
        size: slots that can be handed out: page_size … page_size + size - 1.
        page_size: 1 for single slots, or slots of a page.
        need_sort: sort when lists are merged, so that low slots go first and neighbours stay together.

    Attributes:
        is_held: `[num_slots]` bool, on the device; who may be freed.
    """

    def __init__(
        self, size: int, page_size: int = 1, *, device: str | torch.device = "cpu", need_sort: bool = True
    ) -> None:
        if page_size < 1 or size < page_size or size % page_size:
            raise UserError(
                f"{size} slots cannot be cut into pages of {page_size}; "
                "give a page size of at least 1 and a multiple of it as slots"
            )
        self.size = size
        self.page_size = page_size
        self.device = torch.device(device)
        self.need_sort = need_sort
        self.open_groups = 0
        self.clear()

    @property
    def num_slots(self) -> int:
        """Slots that the pool behind it must have: those handed out and the padding page."""
        return self.size + self.page_size

    @property
    def num_deferred(self) -> int:
        """Slots freed within the open group: neither free nor held until it ends."""
        return sum(map(len, self.deferred))

    def available_size(self) -> int:
        """Slots that `alloc` can give now. Those freed within an open group are not among them."""
        return len(self.free_slots) + len(self.release_slots)

    def clear(self) -> None:
        """Everything is free again, whoever held it; an open group forgets what it was given."""
        slots = torch.arange(self.page_size, self.num_slots, dtype=torch.int32, device=self.device)
        self.free_slots, self.release_slots = slots, slots[:0]
        self.is_held = torch.zeros(self.num_slots, dtype=torch.bool, device=self.device)
        self.deferred: list[Tensor] = []

    def alloc(self, need_size: int) -> Tensor:
        """Hand out `need_size` slots, `[need_size]` int32. With pages, each run of page_size is one page, in order.

        Raises:
            OutOfBlocks: fewer are available; nothing was changed.
            ValueError: need_size is negative or not a multiple of page_size; nothing was changed.
        """
        if need_size < 0 or need_size % self.page_size:
            raise ValueError(f"{need_size} slots were asked for; ask for 0 or more, a multiple of {self.page_size}")
        if need_size > self.available_size():
            waiting = f", {self.num_deferred} wait for a free group to end" if self.deferred else ""
            raise OutOfBlocks(f"need {need_size} slots, {self.available_size()} free of {self.size}{waiting}")
        if need_size > len(self.free_slots):
            self.merge_and_sort_free()
        slots, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        self.is_held[slots] = True
        return slots

    def free(self, indices: Tensor) -> None:
        """Take slots back: `indices`, int32 or int64, holds whole pages, in any order and shape. It is not kept.

        On a GPU the check waits for the device, once a call.

        Raises:
            ValueError: a slot is named twice, is not held, or its page is not named whole; nothing was changed.
        """
        if not indices.numel():
            return
        slots = indices.flatten().sort().values  # a copy: the caller may write over its own right after
        self._check(slots)
        slots = slots.to(torch.int32)
        self.is_held[slots] = False
        if self.open_groups:
            self.deferred.append(slots)
        else:
            self.release_slots = torch.cat((self.release_slots, slots))

    def merge_and_sort_free(self) -> None:
        """Bring the slots that came back into the list that is handed out."""
        self.free_slots = torch.cat((self.free_slots, self.release_slots))
        self.release_slots = self.free_slots[:0]
        if self.need_sort:
            self.free_slots = self.free_slots.sort().values

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """Within it, frees are collected, and joined once at its end. Of groups within groups the outermost counts.

        What was freed is given back even if the group ends with an exception.
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
        """Whether `slots`, sorted, may be freed. All questions are put to the device at once: each answer is a wait."""
        if slots.dtype not in (torch.int32, torch.int64) or len(slots) % self.page_size:
            raise ValueError(
                f"{len(slots)} slots as {slots.dtype} are not whole pages of {self.page_size}; "
                "free every slot of a page in one call, as int32 or int64"
            )
        last = self.num_slots - 1
        astray = (slots > last) | ~self.is_held[slots.clamp(0, last)]  # below 0 asks for slot 0, which nobody holds
        twice = slots[1:] == slots[:-1]
        torn = slots != self._whole_pages(slots)
        if not torch.cat((astray, twice, torn)).any():
            return
        if astray.any():
            which = slots[astray].unique().tolist()
            raise ValueError(f"slots {which} are not held; they were freed before or never given")
        if twice.any():
            raise ValueError(f"slots {slots[1:][twice].unique().tolist()} are named twice; each can be freed once")
        raise ValueError(f"slots {slots.tolist()} are not whole pages of {self.page_size}; free a page in one call")

    def _whole_pages(self, slots: Tensor) -> Tensor:
        """What `slots` should be: the pages in which every page_size-th of them lies."""
        size = self.page_size
        firsts = slots[::size] // size * size
        return (firsts[:, None] + torch.arange(size, dtype=slots.dtype, device=slots.device)).flatten()
