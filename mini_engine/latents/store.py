"""Lesson 16. Lesson 3's pool as a store of latents. It decides for each sequence of a step how to read its latents."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.attention.contract import Batch
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.kv.store_around import StoreAround
from mini_engine.latents.latent_config import LatentConfig
from mini_engine.latents.mixer import AbsorbedStep
from mini_engine.latents.reading import absorbed_attention, expanded_attention, expanding_pays


class LatentKv(StoreAround):
    """The pool of a model with latents: its K are latents, its V rotary keys.

    Args:
        config: of the model, or of a rank's part of it. kv: lesson 3's pool, with a kernel for latents.
        absorbed_step: of the step whose layers use it (`in_step`), if C++ can write and read all of its latents.
    """

    def __init__(self, config: LatentConfig, kv: KvPool, absorbed_step: AbsorbedStep | None = None) -> None:
        super().__init__(kv)
        self.config, self.absorbed_step = config, absorbed_step

    def in_step(self, meta: ForwardMeta) -> "LatentKv":
        """See `Store.in_step`. Raises ValueError if slots or tables do not fit the pool."""
        native = self.kernel.native
        if native is None or not all_absorbed(self.config, meta):
            return self
        return LatentKv(self.config, self.kv, AbsorbedStep(self.kv, native(self.K[0].dtype), meta))

    def attend_latents(self, layer: int, q: Tensor, kv_b: Tensor, meta: ForwardMeta) -> Tensor:
        """Return attention of q `[T, H, nope + rope]`, each sequence over its own latents.

        Sequences for which `expanding_pays` holds are read by `expanded_attention`, all others together by `absorbed`.
        Both read the rows of the caches as the kernel does: `expanded_attention` needs `self.kernel.widen` (lesson 17's
        caches hold bytes).
        If q has as many rows as there are sequences, it is a decode step: all are absorbed, and no lengths are read,
        because on a GPU that would wait for everything launched before.

        Args:
            kv_b: `[H, nope + v, rank]`, which expands a latent to each head's key and value.

        Returns:
            `[T, H, v]` in q's dtype; rows of q that belong to no sequence give zeros.
        """
        if len(q) == len(meta.seq_lens_kv):
            return self.absorbed(layer, q, kv_b, meta.batch)
        starts, kv_lens = meta.cu_seqlens_q.tolist(), meta.seq_lens_kv.tolist()
        expanded = [
            s for s, kv_len in enumerate(kv_lens) if expanding_pays(self.config, starts[s + 1] - starts[s], kv_len)
        ]
        if not expanded:
            return self.absorbed(layer, q, kv_b, meta.batch)
        out = q.new_zeros(*q.shape[:2], self.config.v_head_dim)
        attend = self.kernel.expanded or expanded_attention
        for s in expanded:
            rows, caches = slice(starts[s], starts[s + 1]), (self.kv.K[layer], self.kv.V[layer])
            part = q[rows], caches, meta.block_table[s], kv_lens[s], kv_b, self.config, self.kernel.widen
            out[rows] = attend(*part)
        if others := [s for s in range(len(kv_lens)) if s not in expanded]:
            rows, some = select(meta.batch, others, starts)
            out[rows] = self.absorbed(layer, q[rows], kv_b, some)
        return out

    def absorbed(self, layer: int, q: Tensor, kv_b: Tensor, batch: Batch) -> Tensor:
        """Return attention `[T, H, v]` with kv_b absorbed into queries and results."""
        caches, scale = (self.kv.K[layer], self.kv.V[layer]), self.config.attention_scale

        def attend(q: Tensor, q_rope: Tensor) -> Tensor:
            return self.kernel(q, q_rope, *caches, batch, scale)

        return (self.kernel.absorbed or absorbed_attention)(q, kv_b, self.config, attend)


def all_absorbed(config: LatentConfig, meta: ForwardMeta) -> bool:
    """Return True if `attend_latents` expands no sequence of a step with this plan."""
    if len(meta.slot_mapping) == len(meta.seq_lens_kv):
        return True
    lengths = zip(pairwise(meta.cu_seqlens_q.tolist()), meta.seq_lens_kv.tolist(), strict=True)
    return not any(expanding_pays(config, end - begin, kv_len) for (begin, end), kv_len in lengths)


def select(batch: Batch, chosen: Sequence[int], starts: Sequence[int]) -> tuple[Tensor, Batch]:
    """Return the rows of some sequences `[R]` int64, and a batch of them alone.

    Args:
        starts: `batch.cu_seqlens_q` as numbers.
    """
    device = batch.block_table.device
    rows = torch.cat([torch.arange(starts[s], starts[s + 1], device=device) for s in chosen])
    lengths = torch.tensor([0] + [starts[s + 1] - starts[s] for s in chosen], device=device)
    index = torch.tensor(chosen, device=device)
    return rows, Batch(lengths.cumsum(0).int(), batch.seq_lens_kv[index], batch.block_table[index])
