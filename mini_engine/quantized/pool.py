"""Lesson 17. A KV pool of rows: two or three times the tokens in the same memory, and fewer bytes to read in decode.

K and V are rounded once, when they are written. The layout is lesson 3's, `[num_blocks, block_size, H_kv, row]`, with
rows in place of vectors, so blocks are copied, moved and kept in the tiers as before. Answers are close to those of
full precision, but not the same: `bench.py kv_dtype` measures how close.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mini_engine.attention.registry import load_kernel
from mini_engine.kv.block_tensor import KvPool, KvShape, PoolShape
from mini_engine.kv.pool_maker import PoolMaker
from mini_engine.quantized.formats import RowFormat


class RowKvPool(KvPool):
    """K and V of all requests as rows of a format. Methods not overridden here are lesson 3's.

    Args:
        rows: the format. num_blocks, block_size: as in lesson 3.
        kernel: reads such rows; `kernels.load_kernel` returns one.

    Raises:
        UserError: as in lesson 3.
    """

    def __init__(
        self,
        rows: RowFormat,
        config: PoolShape,
        num_blocks: int,
        block_size: int,
        kernel: Callable[..., Tensor],
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(stored(config, rows), num_blocks, block_size, kernel, rows.dtype, device)
        self.rows, self.k_shape, self.v_shape = rows, config.k_shape, config.v_shape

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Round k and v `[T, H_kv, D]`, and write them into the slots `slot_mapping` `[T]` int64.

        Raises:
            ValueError: as in lesson 3. Nothing is written.
        """
        of_k, of_v = ((len(slot_mapping), *shape) for shape in (self.k_shape, self.v_shape))
        if k.shape != of_k or v.shape != of_v:
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} must be {of_k} and {of_v}, one row for each slot"
            )
        super().set_kv(layer, slot_mapping, self.rows.write(k), self.rows.write(v))


def stored(config: PoolShape, rows: RowFormat) -> KvShape:
    """Return the shape of a pool with a row for each vector of this configuration."""
    (k_heads, k_dim), (v_heads, v_dim) = config.k_shape, config.v_shape
    return KvShape(config.num_hidden_layers, (k_heads, rows.row_bytes(k_dim)), (v_heads, rows.row_bytes(v_dim)))


def bytes_per_token(config: PoolShape, rows: RowFormat) -> int:
    """Return the bytes of one token's K and V in all layers: 2 * H_kv * row_bytes(D) * layers."""
    return stored(config, rows).kv_bytes_per_token(rows.dtype)


class RowPoolMaker(PoolMaker):
    """Makes a RowKvPool.

    Args:
        config, dtype, device, cache: as in lesson 5. rows: the format.
    """

    def __init__(
        self, config: PoolShape, dtype: torch.dtype, device: torch.device, rows: RowFormat, **cache: Any
    ) -> None:
        super().__init__(config, dtype, device, **cache)
        self.rows = rows

    @property
    def bytes_per_token(self) -> int:
        """The bytes that a pool needs for one token, scales included."""
        return bytes_per_token(self.config, self.rows)

    def make(self, num_blocks: int, block_size: int, kernel: str) -> RowKvPool:
        """Return a pool of rows. Kernels have the names of lessons 3 and 16; UserError if there is no such kernel."""
        attend = load_kernel(kernel, self.device, self.dtype, self.rows.name, **self.cache)
        return RowKvPool(self.rows, self.config, num_blocks, block_size, attend, self.device)
