"""Lesson 15. Batches for windowed kernels: lesson 3's with holes behind the windows, and a dense oracle with a mask."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.attention.contract import EVERY_KEY, Kernel
from mini_engine.attention.registry import windowed
from tests.l3.kernel_cases import NAN, Case, make_case, relative_error, with_shared_beginnings

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # torch rounds long chunks' scores to bfloat16


@dataclass(frozen=True)
class Windowed:
    """A case of lesson 3's and the window that its queries have."""

    case: Case
    window: int

    def __repr__(self) -> str:
        return f"{self.case} with a window of {self.window}"

    def attend(self, kernel: Kernel) -> Tensor:
        """Return the kernel's answer."""
        return windowed(kernel, self.window)(*self.inputs)

    @property
    def inputs(self) -> tuple:
        """The kernel's arguments; the scale is by q's size, because rows of int8 are longer."""
        return (*self.case.inputs[:4], self.case.q.shape[2] ** -0.5)

    def expected(self) -> Tensor:
        """Compute the answer in float64 over all keys, with the mask written out; rows of padding are zero."""
        out = torch.zeros(self.case.q.shape, dtype=torch.float64)
        for rows, (k, v) in zip(self.case.rows, self.case.histories, strict=True):
            out[rows] = dense(self.case.q[rows].double(), k.double(), v.double(), self.window)
        return out

    def first_blocks(self) -> list[int]:
        """Return the first block that each sequence's queries see."""
        lengths = zip(self.case.rows, self.case.seq_lens_kv.tolist(), strict=True)
        firsts = [max(0, kv_len - (rows.stop - rows.start) - self.window + 1) for rows, kv_len in lengths]
        return [first // self.case.k_cache.shape[1] for first in firsts]

    def with_holes(self, entry: int = 0, fill: float = NAN) -> "Windowed":
        """Fill the blocks behind the windows, as if others owned them; then let the table say `entry` there."""
        table, k, v = (x.clone() for x in (self.case.block_table, self.case.k_cache, self.case.v_cache))
        for row, first in zip(table, self.first_blocks(), strict=True):
            k[row[:first].long()] = v[row[:first].long()] = torch.tensor(fill).to(k.dtype)
            row[:first] = entry
        return replace(self, case=replace(self.case, k_cache=k, v_cache=v, block_table=table))

    def without_entries(self, entry: int = -1) -> "Windowed":
        """Let the table say `entry` behind the windows; the blocks stay as they are, since others may see them."""
        table = self.case.block_table.clone()
        for row, first in zip(table, self.first_blocks(), strict=True):
            row[:first] = entry
        return replace(self, case=replace(self.case, block_table=table))

    def alone(self, s: int) -> "Windowed":
        """Return sequence s in a batch of its own."""
        rows = self.case.rows[s]
        return replace(self, case=self.case.part(s, 0, rows.stop - rows.start))


def dense(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attend to all keys through a mask: the query at position i sees key j if i - window < j <= i."""
    (q_len, heads, dim), kv_len = q.shape, len(k)
    i, j = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
    mask = (i - window < j) & (j <= i)
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def windowed_case(lengths: list[tuple[int, int]], window: int, **options) -> Windowed:
    """Return sequences of the given (q_len, kv_len); `options` are `make_case`'s."""
    return Windowed(make_case(lengths, **options), window)


def crowd(count: int, shared: int, window: int, seed: int, block_size: int, **options) -> Windowed:
    """Return `count` sequences, most of which begin with the same `shared` keys, as chats behind a system prompt.

    Most decode, some are chunks; some share only half, or nothing.
    """
    choose = random.Random(seed)
    lengths, groups, blocks = [], [], []
    for _ in range(count):
        q_len = choose.choice([1] * 12 + [0, 2, 9])
        lengths.append((q_len, shared + choose.randint(max(q_len, 1), choose.choice([12, 12, 12, 40]))))
        groups.append(choose.choice([0] * 7 + [1]))
        blocks.append(choose.choice([shared] * 8 + [shared // 2, 0]) // block_size)
    plain = make_case(lengths, block_size=block_size, **options)
    return Windowed(with_shared_beginnings(plain, groups, blocks), window)


def check_crowd(case: Windowed, attend: Callable[[Windowed], Tensor], has_same_bits: bool) -> None:
    """Compare a crowd with the oracle and, where that is promised, with the bits that each sequence gets alone."""
    case = case.without_entries()
    out = attend(case)
    error = relative_error(out, case.expected())
    assert error < TOLERANCE[out.dtype], f"relative error {error:.2g} against a dense mask in float64, for {case}"
    for s, rows in enumerate(case.case.rows if has_same_bits else []):
        assert torch.equal(out[rows], attend(case.alone(s))), f"sequence {s} rounds otherwise in a crowd, of {case}"


@st.composite
def crowds(draw) -> Windowed:
    """Draw a crowd with a window a bit longer than what it shares, with any other, or without one."""
    shared = draw(st.sampled_from([96, 130, 64, 200, 40]), "shared keys")
    longer = st.sampled_from([14, 30, 50, 5]).map(lambda more: shared + more)
    heads, kv_heads = draw(st.sampled_from([(4, 2), (4, 4), (8, 1), (6, 3)]))
    return crowd(
        draw(st.sampled_from([100, 50, 130, 64])),
        shared,
        draw(st.one_of(longer, longer, longer, st.integers(1, 300), st.just(EVERY_KEY)), "window"),
        draw(st.integers(0, 10**6)),
        draw(st.sampled_from([16, 4, 7, 1, 32])),
        heads=heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([16, 32, 40])),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
    )
