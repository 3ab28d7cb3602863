"""Lesson 16. Batches for the kernels over latents: lesson 3's, whose V has a width of its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from mini_engine.attention.contract import Batch
from tests.l3.kernel_cases import NAN, int32

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}  # of sums in float32, rounded once
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 5e-2}  # where scores and weights are rounded to the dtype as well


@dataclass(frozen=True, repr=False)
class LatentCase:
    """The inputs of one call, and each sequence's latents and rotary keys in order."""

    q: Tensor
    q_rope: Tensor
    c_cache: Tensor
    r_cache: Tensor
    cu_seqlens_q: Tensor
    seq_lens_kv: Tensor
    block_table: Tensor
    histories: list[tuple[Tensor, Tensor]]
    scale: float

    def __repr__(self) -> str:
        lengths = [(rows.stop - rows.start, len(c)) for rows, (c, _) in zip(self.rows, self.histories, strict=True)]
        return f"(q_len, kv_len) {lengths}, q {list(self.q.shape)}, cache {list(self.c_cache.shape)}, {self.q.dtype}"

    @property
    def inputs(self) -> tuple:
        batch = Batch(self.cu_seqlens_q, self.seq_lens_kv, self.block_table)
        return (self.q, self.q_rope, self.c_cache, self.r_cache, batch, self.scale)

    @property
    def rows(self) -> list[slice]:
        """Each sequence's rows of q."""
        return [slice(begin, end) for begin, end in pairwise(self.cu_seqlens_q.tolist())]

    def expected(self, of: Callable[[Tensor], Tensor] = Tensor.double) -> Tensor:
        """Compute the answer in float64, or the same weighted sums `of` the latents; rows of padding are zero."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for rows, (c, r) in zip(self.rows, self.histories, strict=True):
            queries = self.q[rows].double(), self.q_rope[rows].double()
            out[rows] = dense(*queries, c.double(), r.double(), self.scale, of(c.double()))
        return out

    def error_of(self, out: Tensor) -> float:
        """Return the largest difference from the answer, relative to the largest sum of what was added, without signs.

        Not relative to the answer: latents of both signs may cancel out, and rounding then has nothing to be small to.
        """
        most = self.expected(Tensor.abs).max().clamp_min(1e-30)
        return float((out.double() - self.expected()).abs().max() / most)

    def part(self, s: int, begin: int, end: int) -> "LatentCase":
        """Return sequence s alone, fed only its queries begin … end - 1, as if the later ones had not arrived yet."""
        rows = self.rows[s]
        kv_len = int(self.seq_lens_kv[s]) - (rows.stop - rows.start - end)
        return replace(
            self,
            q=self.q[rows][begin:end],
            q_rope=self.q_rope[rows][begin:end],
            cu_seqlens_q=int32([0, end - begin]),
            seq_lens_kv=int32([kv_len]),
            block_table=self.block_table[s : s + 1],
            histories=[tuple(x[:kv_len] for x in self.histories[s])],
        )

    def with_shared_beginning(self, blocks: int) -> "LatentCase":
        """Return the case with the first blocks of every sequence replaced by those of the first one."""
        table, keys = self.block_table.clone(), blocks * self.c_cache.shape[1]
        table[:, :blocks] = table[0, :blocks]
        first = self.histories[0]
        histories = [
            tuple(torch.cat([shared[:keys], own[keys:]]) for shared, own in zip(first, history, strict=True))
            for history in self.histories
        ]
        return replace(self, block_table=table, histories=histories)


def dense(q: Tensor, q_rope: Tensor, c: Tensor, r: Tensor, scale: float, values: Tensor) -> Tensor:
    """Attend as ordinary attention with one head of keys, [c; r], and a dense mask. The values are c, or made of it."""
    q_len, kv_len = len(q), len(c)
    scores = torch.cat([q, q_rope], dim=2).transpose(0, 1) @ torch.cat([c, r], dim=1).T * scale  # [H, q_len, kv_len]
    later = torch.ones(q_len, kv_len, dtype=torch.bool).triu(kv_len - q_len + 1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ values).transpose(0, 1)


def latent_case(
    lengths: list[tuple[int, int]],
    heads: int = 4,
    rank: int = 32,
    rope: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    poison: float = NAN,
    padding: int = -1,
    padded_rows: int = 2,
    seed: int = 0,
) -> LatentCase:
    """Return sequences of the given (q_len, kv_len) whose blocks are shuffled in one pool.

    `poison` fills the slots that no sequence owns (the null block, a spare block, the ends of last blocks) and
    `padded_rows` rows of q past the last sequence. `padding` fills the block table past the needed entries.
    """
    generator, shuffle = (torch.Generator().manual_seed(seed) for _ in range(2))  # data do not depend on the blocks
    counts = [-(-kv_len // block_size) for _, kv_len in lengths]
    order = (torch.randperm(sum(counts) + 1, generator=shuffle) + 1).tolist()  # block 0 and one more stay unowned
    caches = [torch.full((sum(counts) + 2, block_size, 1, dim), poison, dtype=dtype) for dim in (rank, rope)]
    table = torch.full((len(lengths), max(counts, default=0) + 1), padding, dtype=torch.int32)
    histories = []
    for s, ((_, kv_len), count) in enumerate(zip(lengths, counts, strict=True)):
        blocks, order = order[:count], order[count:]
        table[s, :count] = int32(blocks)
        slots = torch.tensor([blocks[i // block_size] * block_size + i % block_size for i in range(kv_len)]).long()
        histories.append(tuple(torch.randn(kv_len, dim, generator=generator).to(dtype) for dim in (rank, rope)))
        for cache, vectors in zip(caches, histories[-1], strict=True):
            cache.flatten(0, 1)[slots] = vectors[:, None]
    starts = torch.tensor([0] + [q_len for q_len, _ in lengths]).cumsum(0).int()
    queries = [torch.randn(int(starts[-1]), heads, dim, generator=generator).to(dtype) for dim in (rank, rope)]
    q, q_rope = (torch.cat([x, torch.full((padded_rows, *x.shape[1:]), poison, dtype=dtype)]) for x in queries)
    kv_lens = int32([kv_len for _, kv_len in lengths])
    return LatentCase(q, q_rope, caches[0], caches[1], starts, kv_lens, table, histories, (rank + rope) ** -0.5)


def changed_key(case: LatentCase, s: int, key: int, part: Callable[[LatentCase], Tensor]) -> LatentCase:
    """Return the case with another vector for one token of sequence s; `part` chooses the latent or the rotary key."""
    changed = replace(case, c_cache=case.c_cache.clone(), r_cache=case.r_cache.clone())
    block_size = case.c_cache.shape[1]
    part(changed)[int(case.block_table[s, key // block_size]), key % block_size] += 1
    return changed
