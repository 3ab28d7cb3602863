"""Lesson 11. Python bindings of `hybrid_layers.cpp`: delta nets and short convolutions."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from mini_engine.base.native_build import Library, Signature
from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.layers.blocks import SOURCES as BLOCKS
from mini_engine.layers.blocks import Entry
from mini_engine.layers.native import Place

HERE = Path(__file__).parent
SOURCES = (*(HERE / name for name in ("hybrid_layers.cpp", "gdn_step.h", "conv_step.h", "feeds.h")), *BLOCKS)


class StepSizes(ctypes.Structure):
    """The sizes of a model's delta nets; `gdn_step.h` has the same struct."""

    _fields_ = tuple((name, c_int64) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps"))


class FeedStruct(ctypes.Structure):
    """A `Feed` with the addresses of its tensors; `feeds.h` has the same struct."""

    _fields_ = (
        *((name, c_int64) for name in ("sequences", "longest")),
        *((name, c_void_p) for name in ("rows", "counts", "sources", "slots")),
    )


class Feed(NamedTuple):
    """What N sequences feed in a call, int64 `[N]` each, contiguous.

    sources, slots: where each sequence's state is, and where the state behind its tokens goes.
    rows, counts: a sequence's first row, and its number of tokens; None: row i and one token.
    """

    sources: Tensor
    slots: Tensor
    rows: Tensor | None = None
    counts: Tensor | None = None

    @property
    def longest(self) -> int:
        """The most tokens of a sequence."""
        return 1 if self.counts is None or not len(self.counts) else int(self.counts.max())

    def check(self, num_rows: int, num_slots: int) -> None:
        """Raise ValueError unless all rows and slots exist."""
        for slots in (self.slots,) if self.sources is self.slots else (self.sources, self.slots):
            numbers = slots.tolist()
            if numbers and not 0 <= min(numbers) <= max(numbers) < num_slots:
                raise ValueError(f"state slots {numbers} are not all in 0 … {num_slots - 1}")
        if self.rows is None or self.counts is None:
            if len(self.slots) != num_rows:
                raise ValueError(f"there are {len(self.slots)} state slots for {num_rows} rows; one for each is needed")
        elif len(self.rows) and not 0 <= int(self.rows.min()) <= int((self.rows + self.counts).max()) <= num_rows:
            raise ValueError(f"sequences begin in rows {self.rows.tolist()} and do not all end before row {num_rows}")


class Feeds:
    """The feeds of a step, one after the other, checked once for all layers.

    Args:
        num_rows: of the step. num_slots: of the pool of states.

    Raises:
        ValueError: a slot or a row does not exist.
    """

    def __init__(self, feeds: Sequence[Feed], num_rows: int, num_slots: int) -> None:
        for feed in feeds:
            feed.check(num_rows, num_slots)
        self.feeds, self.num_rows = feeds, num_rows  # the tensors must outlive their addresses
        self.structs = (FeedStruct * len(feeds))(
            *(
                FeedStruct(
                    sequences=len(feed.slots),
                    longest=feed.longest,
                    **{name: None if part is None else part.data_ptr() for name, part in feed._asdict().items()},
                )
                for feed in feeds
            )
        )


class Gates(ctypes.Structure):
    """Further weights of a delta net in one call; `gdn_step.h` has the same struct."""

    _fields_ = (*((name, c_void_p) for name in ("rate", "dt_bias", "norm")), ("eps", c_float))


class ConvSizes(ctypes.Structure):
    """A short convolution; `conv_step.h` has the same struct."""

    _fields_ = (*((name, c_int64) for name in ("channels", "taps")), *((name, c_void_p) for name in ("weight", "bias")))


FEEDS, REST = (POINTER(FeedStruct), c_int64), (POINTER(Place), c_int)
FUNCTIONS = {
    "delta_net": Signature((POINTER(Entry), POINTER(StepSizes), *FEEDS, *[c_void_p] * 3, POINTER(Gates), *REST), None),
    "short_conv": Signature((POINTER(Entry), POINTER(ConvSizes), *FEEDS, c_void_p, *REST), None),
}
LIBRARY = Library(SOURCES, FUNCTIONS, "the C++ step", "use the torch backend")


def step_sizes(config: HybridConfig) -> StepSizes:
    """Return the sizes of this model's delta nets."""
    return StepSizes(
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        taps=config.linear_conv_kernel_dim,
    )


def by_tap(weight: Tensor) -> Tensor:
    """Return a convolution's weight `[C, K]` as C++ reads it: `[K, C]` float32."""
    return weight.float().T.contiguous()
