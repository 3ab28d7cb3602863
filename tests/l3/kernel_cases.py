"""Lesson 3. Batches for the attention kernels, in pools where every slot that no sequence owns is poisoned."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.attention.contract import Batch
from tests.support import oracle

NAN = float("nan")


@dataclass(frozen=True, repr=False)
class Case:
    """The inputs of one call, and each sequence's keys and values in order."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cu_seqlens_q: Tensor
    seq_lens_kv: Tensor
    block_table: Tensor
    histories: list[tuple[Tensor, Tensor]]

    def __repr__(self) -> str:
        lengths = [(rows.stop - rows.start, len(k)) for rows, (k, _) in zip(self.rows, self.histories, strict=True)]
        shapes = f"q {list(self.q.shape)}, cache {list(self.k_cache.shape)}"
        return f"(q_len, kv_len) {lengths}, {shapes}, {self.q.dtype}"

    @property
    def batch(self) -> Batch:
        return Batch(self.cu_seqlens_q, self.seq_lens_kv, self.block_table)

    @property
    def inputs(self) -> tuple:
        return (self.q, self.k_cache, self.v_cache, self.batch, self.k_cache.shape[3] ** -0.5)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of a call."""
        return [self.q, self.k_cache, self.v_cache, *self.batch]

    def on(self, device: str) -> tuple:
        """Return the inputs with their tensors on a device."""
        *caches, batch, scale = self.inputs
        return (*(x.to(device) for x in caches), Batch(*(x.to(device) for x in batch)), scale)

    @property
    def rows(self) -> list[slice]:
        """Each sequence's rows of q."""
        return [slice(begin, end) for begin, end in pairwise(self.cu_seqlens_q.tolist())]

    def expected(self) -> Tensor:
        """Compute the answer in float64; rows of padding are zero."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for rows, (k, v) in zip(self.rows, self.histories, strict=True):
            out[rows] = oracle(self.q[rows], k, v)
        return out

    def part(self, s: int, begin: int, end: int) -> "Case":
        """Return sequence s alone, fed only its queries begin … end - 1, as if the later ones had not arrived yet."""
        rows = self.rows[s]
        kv_len = int(self.seq_lens_kv[s]) - (rows.stop - rows.start - end)
        return replace(
            self,
            q=self.q[rows][begin:end],
            cu_seqlens_q=int32([0, end - begin]),
            seq_lens_kv=int32([kv_len]),
            block_table=self.block_table[s : s + 1],
            histories=[tuple(x[:kv_len] for x in self.histories[s])],
        )


def int32(data: list) -> Tensor:
    return torch.tensor(data, dtype=torch.int32)


def make_case(
    lengths: list[tuple[int, int]],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    poison: float = NAN,
    padding: int = -1,
    padded_rows: int = 2,
    seed: int = 0,
) -> Case:
    """Return sequences of the given (q_len, kv_len) whose blocks are shuffled in one pool.

    `poison` fills the slots that no sequence owns (the null block, a spare block, the ends of last blocks) and
    `padded_rows` rows of q past the last sequence. `padding` fills the block table past the needed entries.
    """
    generator, shuffle = (torch.Generator().manual_seed(seed) for _ in range(2))  # data do not depend on the blocks
    counts = [-(-kv_len // block_size) for _, kv_len in lengths]
    order = (torch.randperm(sum(counts) + 1, generator=shuffle) + 1).tolist()  # block 0 and one more stay unowned
    k_cache = torch.full((sum(counts) + 2, block_size, kv_heads, dim), poison, dtype=dtype)
    v_cache = k_cache.clone()
    table = torch.full((len(lengths), max(counts, default=0) + 1), padding, dtype=torch.int32)
    histories = []
    for s, ((_, kv_len), count) in enumerate(zip(lengths, counts, strict=True)):
        blocks, order = order[:count], order[count:]
        table[s, :count] = int32(blocks)
        slots = torch.tensor([blocks[i // block_size] * block_size + i % block_size for i in range(kv_len)]).long()
        k, v = (torch.randn(kv_len, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
        k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots] = k, v
        histories.append((k, v))
    starts = torch.tensor([0] + [q_len for q_len, _ in lengths]).cumsum(0).int()
    q = torch.randn(int(starts[-1]), heads, dim, generator=generator).to(dtype)
    q = torch.cat([q, torch.full((padded_rows, heads, dim), poison, dtype=dtype)])
    return Case(q, k_cache, v_cache, starts, int32([kv_len for _, kv_len in lengths]), table, histories)


def with_shared_beginnings(case: Case, groups: list[int], blocks: list[int]) -> Case:
    """Return the case with the first `blocks[s]` blocks of sequence s replaced by those of its group's first one."""
    table, histories = case.block_table.clone(), list(case.histories)
    size = case.k_cache.shape[1]
    for s, group in enumerate(groups):
        leader = groups.index(group)
        most = min(int(case.seq_lens_kv[one]) // size for one in (s, leader))
        count = min(blocks[s], most)
        table[s, :count] = table[leader, :count]
        histories[s] = tuple(
            torch.cat([first[: count * size], own[count * size :]])
            for first, own in zip(histories[leader], histories[s], strict=True)
        )
    return replace(case, block_table=table, histories=histories)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected number; NaN if there is any NaN."""
    return float((out.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
