"""Lesson 12. A KV pool of int8 rows: about twice the tokens in the same memory, and half the bytes to read in decode.

K and V are rounded once, when they are written. The layout is lesson 3's, `[num_blocks, block_size, H_kv, row]`, with
rows in place of vectors, so blocks are copied, moved and kept in the tiers as before. Answers are close to those of
full precision, but they are not the same: `bench.py kv_dtype` measures how close.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mini_engine.attention.contract import Kernel
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.int8.rows import pack, row_bytes
from mini_engine.kv.block_tensor import KvPool


class Int8KvPool(KvPool):
    """K and V of all requests as int8 rows. Methods not overridden here are lesson 3's.

    Args:
        num_blocks, block_size: as in lesson 3.
        kernel: reads int8 rows; `kernels.load_kernel` returns one.

    Raises:
        UserError: as in lesson 3.
    """

    direct = False

    def __init__(
        self,
        config: Qwen3Config,
        num_blocks: int,
        block_size: int,
        kernel: Kernel,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(stored(config), num_blocks, block_size, kernel, torch.int8, device)
        self.head_dim = config.head_dim

    def set_kv(self, layer: int, slot_mapping: Tensor, k: Tensor, v: Tensor) -> None:
        """Round k and v `[T, H_kv, D]`, and write them into the slots `slot_mapping` `[T]` int64.

        Raises:
            ValueError: as in lesson 3. Nothing is written.
        """
        expected = (len(slot_mapping), self.K[layer].shape[2], self.head_dim)
        if k.shape != expected or v.shape != expected:
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} must both be {expected}, one row for each slot"
            )
        super().set_kv(layer, slot_mapping, pack(k), pack(v))


def stored(config: Qwen3Config) -> Qwen3Config:
    """Return the configuration of a model whose heads, at one byte a number, are as large as this one's rows."""
    return replace(config, head_dim=row_bytes(config.head_dim))


def bytes_per_token(config: Qwen3Config) -> int:
    """Return the bytes of one token's K and V in all layers: 2 * H_kv * row_bytes(D) * layers."""
    return stored(config).kv_bytes_per_token(torch.int8)
