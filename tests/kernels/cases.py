"""Course machinery. Batches for attention kernels: what no query may see is poison, and a plain float64 reference.

A sequence's own slots hold its keys and values, or its latents and rotary keys, as numbers or as rows of bytes. Every
other slot is poison: the null block, the unwritten end of a last block, blocks behind all windows, blocks of sequences
without queries. Every entry of the table that no query needs is one that must not be followed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mini_engine.attention.contract import EVERY_KEY, Batch

NAN = float("nan")
MIXED = ((1, 9), (4, 4), (3, 8), (1, 1), (0, 5), (5, 14), (1, 70), (20, 75))  # (q_len, kv_len)


@dataclass(frozen=True, repr=False)
class Case:
    """The inputs of one call, and each sequence's keys and values `[kv_len, H_kv, …]` in float64, as they are stored.

    queries: q, and over latents q_rope. caches: keys and values, or latents and rotary keys.
    """

    queries: tuple[Tensor, ...]
    caches: tuple[Tensor, Tensor]
    batch: Batch
    scale: float
    window: int
    histories: list[tuple[Tensor, Tensor]]

    def __repr__(self) -> str:
        lengths = [(rows.stop - rows.start, len(k)) for rows, (k, _) in zip(self.rows, self.histories, strict=True)]
        shapes = f"q {list(self.q.shape)}, caches {list(self.caches[0].shape)} and {list(self.caches[1].shape)}"
        return f"(q_len, kv_len) {lengths}, window {self.window}, {shapes}, {self.q.dtype}"

    @property
    def q(self) -> Tensor:
        return self.queries[0]

    @property
    def inputs(self) -> tuple:
        return (*self.queries, *self.caches, self.batch, self.scale)

    @property
    def rows(self) -> list[slice]:
        """Each sequence's rows of q."""
        return [slice(begin, end) for begin, end in pairwise(self.batch.cu_seqlens_q.tolist())]

    @cached_property
    def expected(self) -> tuple[Tensor, float]:
        """The answer in float64, zero in rows of padding, and the largest sum of what is added up, without signs."""
        out, unsigned = torch.zeros(2, *self.q.shape, dtype=torch.float64)
        q = torch.cat([x.double() for x in self.queries], dim=-1)
        for rows, (k, v) in zip(self.rows, self.histories, strict=True):
            out[rows], unsigned[rows] = attended(q[rows], k, (v, v.abs()), self.scale, self.window)
        return out, max(float(unsigned.max()), 1e-30)

    def error_of(self, out: Tensor) -> float:
        """Return the largest difference from the answer; NaN if there is any NaN.

        It is relative to the largest sum without signs: values of both signs may cancel out, rounding does not.
        """
        answer, most = self.expected
        return float((out.double() - answer).abs().max() / most)

    def with_tables(self, **tables: Tensor) -> "Case":
        """Return the case with other tables."""
        return replace(self, batch=self.batch._replace(**tables))

    def on(self, device: str) -> tuple:
        """Return the inputs with their tensors on a device."""
        tensors = [x.to(device) for x in (*self.queries, *self.caches)]
        return (*tensors, Batch(*(x.to(device) for x in self.batch)), self.scale)

    def part(self, s: int, begin: int = 0, end: int | None = None) -> "Case":
        """Return sequence s alone, fed only its queries begin … end - 1, as if the later ones had not arrived yet."""
        rows = self.rows[s]
        end = rows.stop - rows.start if end is None else end
        kv_len = int(self.batch.seq_lens_kv[s]) - (rows.stop - rows.start - end)
        return replace(
            self,
            queries=tuple(q[rows][begin:end] for q in self.queries),
            batch=Batch(int32([0, end - begin]), int32([kv_len]), self.batch.block_table[s : s + 1]),
            histories=[tuple(x[:kv_len] for x in self.histories[s])],
        )


def attended(q: Tensor, k: Tensor, values: Sequence[Tensor], scale: float, window: int) -> list[Tensor]:
    """Attend to all keys of one sequence through a mask: position i sees key j if i - window < j <= i."""
    i, j = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    k, *values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, *values))  # by h // (H_q // H_kv)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    hidden = (j > i) | (j <= i - window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return [torch.einsum("hqk,khd->qhd", weights, v) for v in values]


def int32(data: Sequence) -> Tensor:
    return torch.tensor(data, dtype=torch.int32)


def make_case(
    lengths: Sequence[tuple[int, int]],
    rows: Any = None,
    latents: bool = False,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    rope: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    window: int = EVERY_KEY,
    shared: Sequence[tuple[int, int]] | None = None,
    poison: float = NAN,
    entry: int = -1,
    padded_rows: int = 2,
    seed: int = 0,
) -> Case:
    """Return sequences of the given (q_len, kv_len) whose blocks are shuffled in one pool.

    Tokens and heads differ in size, so that another's scale shows. Data do not depend on the blocks.

    Args:
        rows: the format of the caches' rows (lesson 17), None for numbers of this dtype.
        latents: the caches hold latents of `dim` numbers and rotary keys of `rope`, for one head of keys (lesson 16).
        shared: for each sequence (group, blocks): its first blocks are those of the first sequence of that group.
        poison: fills the slots that no query sees, and `padded_rows` rows of q behind the last sequence.
        entry: fills the table where no query needs a block.
    """
    generator, shuffle = (torch.Generator().manual_seed(seed) for _ in range(2))
    widths, kv_heads = ((dim, rope), 1) if latents else ((dim, dim), kv_heads)
    counts = [-(-kv_len // block_size) for _, kv_len in lengths]
    order = (torch.randperm(sum(counts) + 1, generator=shuffle) + 1).tolist()  # block 0 and one more stay unowned
    caches = [
        stored(torch.full((sum(counts) + 2, block_size, kv_heads, width), poison), rows, dtype) for width in widths
    ]
    table = torch.full((len(lengths), max(counts, default=0) + 1), entry, dtype=torch.int32)
    tables, vectors, histories = [], [], []
    for s, ((q_len, kv_len), count) in enumerate(zip(lengths, counts, strict=True)):
        blocks, order = order[:count], order[count:]
        own = [some((kv_len, kv_heads, width), generator) for width in widths]
        if shared:
            leader = [group for group, _ in shared].index(shared[s][0])
            same = 0 if leader == s else min(shared[s][1], kv_len // block_size, lengths[leader][1] // block_size)
            keys = same * block_size
            blocks[:same] = tables[leader][:same] if same else []
            own = [torch.cat([x[:keys], y[keys:]]) for x, y in zip(vectors[leader] if same else own, own, strict=True)]
        tables.append(blocks), vectors.append(own)
        written = [stored(x, rows, dtype) for x in own]
        first = max(0, kv_len - q_len - window + 1) // block_size if q_len else count  # the first block that is seen
        table[s, first:count] = int32(blocks[first:])
        slots = torch.tensor([blocks[i // block_size] * block_size + i % block_size for i in range(kv_len)]).long()
        for cache, x in zip(caches, written, strict=True):
            cache.flatten(0, 1)[slots[first * block_size :]] = x[first * block_size :]
        k, v = (meant(x, rows, width) for x, width in zip(written, widths, strict=True))
        histories.append((torch.cat([k, v], dim=-1), k) if latents else (k, v))
    starts = torch.tensor([0] + [q_len for q_len, _ in lengths]).cumsum(0).int()
    queries = tuple(
        torch.cat([x, torch.full((padded_rows, *x.shape[1:]), poison)]).to(dtype)
        for x in (torch.randn(int(starts[-1]), heads, width, generator=generator) for width in widths[: 1 + latents])
    )
    batch = Batch(starts, int32([kv_len for _, kv_len in lengths]), table)
    return Case(queries, tuple(caches), batch, sum(q.shape[2] for q in queries) ** -0.5, window, histories)


def some(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    sizes = 2.0 ** torch.randint(-2, 2, (*shape[:-1], 1), generator=generator)
    return torch.randn(shape, generator=generator) * sizes


def stored(x: Tensor, rows: Any, dtype: torch.dtype) -> Tensor:
    """Return vectors as a cache holds them."""
    return rows.write(x) if rows else x.to(dtype)


def meant(x: Tensor, rows: Any, width: int) -> Tensor:
    """Return the vectors in float64 that a cache holds."""
    return (rows.read(x, width, torch.float32) if rows else x).double()


def crowd(count: int, keys: int, seed: int, block_size: int) -> dict[str, Any]:
    """Return lengths and shared blocks of sequences of which most begin with the same keys, as behind a system prompt.

    Most decode, some are chunks; some share only half, or nothing.
    """
    choose = random.Random(seed)
    lengths, shared = [], []
    for _ in range(count):
        q_len = choose.choice([1] * 12 + [0, 2, 9])
        lengths.append((q_len, keys + choose.randint(max(q_len, 1), choose.choice([12, 12, 12, 40]))))
        blocks = choose.choice([keys] * 8 + [keys // 2, 0]) // block_size
        shared.append((choose.choice([0] * 7 + [1]), blocks))
    return dict(lengths=lengths, shared=tuple(shared), block_size=block_size)
