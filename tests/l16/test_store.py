"""Lesson 16. The store: for each sequence the cheaper of two ways to read its latents, and one answer for all."""

from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mini_engine.kv.block_table import NULL_BLOCK
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.latents import reading, store
from mini_engine.latents.attention import reference_attention
from mini_engine.latents.contract import LatentKernel, as_it_is
from mini_engine.latents.store import LatentKv
from tests.shared.small_latents import (
    BLOCK_SIZE,
    HEADS,
    NOPE,
    RANK,
    ROPE,
    V,
    attention,
    close,
    config_of,
    pack,
    pool_of,
    randoms,
    same,
    unpack,
)
from tests.support import must_raise

task = pytest.mark.task(5)
CONFIG = config_of()
LAYER = 1
MIXED = [(1, 9), (6, 6), (1, 5), (0, 4), (3, 11), (2, 12)]  # (q_len, kv_len)


class Watched:
    """A store whose two ways are this file's own, with a note of each use.

    absorbed: the kernel's tables for each call. expanded: the (q_len, kv_len) of each call.
    asked: the (q_len, kv_len) for which `expanding_pays` was asked; `pays` is its answer.
    """

    def __init__(self, lengths, monkeypatch, pays=lambda q_len, kv_len: q_len >= 3, pack=None):
        packed = as_it_is if pack is None else lambda x, dim, dtype: pack(x.nan_to_num())
        self.pool = pool_of(lengths, pack=packed, padding=NULL_BLOCK)
        self.absorbed, self.expanded, self.asked, self.pays = [], [], [], pays
        for module in (reading, store):
            monkeypatch.setattr(module, "absorbed_attention", self.absorbing)
            monkeypatch.setattr(module, "expanded_attention", self.expanding)
            monkeypatch.setattr(module, "expanding_pays", self.paying)
        self.kv_b = randoms((HEADS, NOPE + V, RANK), seed=1)[0]
        self.q = randoms((int(self.pool.starts[-1]), HEADS, NOPE + ROPE), seed=2)[0]
        self.kv = LatentKv(CONFIG, self.make_pool(pack))

    def make_pool(self, pack):
        num_blocks = len(self.pool.c_cache)
        pool = KvPool(CONFIG, num_blocks, BLOCK_SIZE, self.kernel(unpack if pack else as_it_is))
        pool.K[LAYER], pool.V[LAYER] = self.pool.c_cache, self.pool.r_cache
        return pool

    def kernel(self, widen):
        def attend(q, q_rope, c_cache, r_cache, batch, scale):
            self.absorbed.append(SimpleNamespace(rows=len(q), batch=batch, scale=scale))
            return reference_attention(q, q_rope, c_cache, r_cache, batch, scale, widen)

        return LatentKernel("watched", attend, widen, row_of=len_of(widen))

    def absorbing(self, q, kv_b, config, attend):
        sums = attend(torch.einsum("thn,hnr->thr", q[..., :NOPE], kv_b[:, :NOPE]), q[..., NOPE:])
        return torch.einsum("thr,hvr->thv", sums, kv_b[:, NOPE:])

    def expanding(self, q, caches, block_ids, kv_len, kv_b, config, widen=as_it_is):
        assert widen is self.kv.kernel.widen, "expanded_attention reads rows as the kernel does: give it its `widen`"
        self.expanded.append((len(q), kv_len))
        slots = [int(block_ids[i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for i in range(kv_len)]
        c, r = (widen(x.flatten(0, 1)[slots], dim, q.dtype)[:, 0] for x, dim in zip(caches, (RANK, ROPE), strict=True))
        return attention(q, c, r, kv_b, config.attention_scale).float()

    def paying(self, config, q_len, kv_len):
        self.asked.append((q_len, kv_len))
        return self.pays(q_len, kv_len)

    def attend(self, padding=0):
        """Return the store's answer, with so many rows of NaN behind the last sequence's."""
        q, pool = torch.cat([self.q, self.q.new_full((padding, *self.q.shape[1:]), float("nan"))]), self.pool
        none = torch.zeros(0, dtype=torch.int64)
        meta = ForwardMeta(none, none, pool.starts, pool.lens, pool.table, BLOCK_SIZE)
        return self.kv.attend_latents(LAYER, q, self.kv_b, meta)

    def check(self, out, teach, histories=None):
        """Compare each sequence's rows with attention over its own latents; name the sequence whose rows they are."""
        want = [
            attention(self.q[rows], *history, self.kv_b, CONFIG.attention_scale)
            for rows, history in zip(self.pool.rows, histories or self.pool.histories, strict=True)
        ]
        for s, rows in enumerate(self.pool.rows):
            way = "expanded" if self.pays(*self.lengths[s]) else "absorbed"
            where = f"{teach}: rows {rows.start} to {rows.stop - 1} are sequence {s}'s, which is {way}"
            elsewhere = [
                j for j, row in enumerate(out) if len(want[s]) and j != rows.stop - 1 and same(row, want[s][-1])
            ]
            if elsewhere:
                where += f"; here its last row lies at {elsewhere[0]}"
            close(out[rows], want[s], where, {"they are zeros: nothing was written there": torch.zeros_like(want[s])})

    @property
    def lengths(self):
        return [(rows.stop - rows.start, kv) for rows, kv in zip(self.pool.rows, self.pool.lens.tolist(), strict=True)]


def len_of(widen):
    return (lambda dim: dim + 1) if widen is unpack else int


class Waits(TorchFunctionMode):
    """Within it, `names` has the calls that bring numbers of a tensor to Python; on a device, each of them waits."""

    CALLS = ("tolist", "item", "__int__", "__float__", "__bool__", "__index__", "__iter__", "numpy", "__contains__")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in self.CALLS:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@task
def test_decodes_are_absorbed_in_one_call(monkeypatch):
    watched = Watched([(1, 9), (1, 5), (1, 12)], monkeypatch)
    out = watched.attend()
    assert watched.expanded == [], "a decode would expand its whole history for one query"
    assert len(watched.absorbed) == 1, "one call of the kernel for all sequences of a decode step"
    watched.check(out, "a decode step of three")


@task
def test_a_decode_step_reads_no_lengths(monkeypatch):
    watched = Watched([(1, 9), (1, 5), (1, 12)], monkeypatch)
    monkeypatch.setattr(LatentKernel, "__call__", lambda kernel, q, *rest: torch.zeros_like(q))  # which may read them
    with Waits() as waits:
        watched.attend()
    teach = "on a device, this waits for everything that was launched: q has a row for each sequence"
    assert waits.names == [], teach


@task
def test_a_long_prompt_is_expanded(monkeypatch):
    watched = Watched([(11, 11)], monkeypatch)
    out = watched.attend()
    assert watched.expanded == [(11, 11)], (
        "expanding_pays for 11 queries over 11 tokens: one call, for its (q_len, kv_len)"
    )
    assert watched.absorbed == [], "no sequence is left to be absorbed"
    watched.check(out, "a prompt")


@task
def test_a_chunk_that_does_not_pay_is_absorbed(monkeypatch):
    watched = Watched([(2, 12), (2, 9)], monkeypatch)
    out = watched.attend()
    assert watched.expanded == [], "expanding does not pay for 2 queries here"
    assert len(watched.absorbed) == 1, "one call of the kernel for both"
    watched.check(out, "two short chunks")


@task
def test_each_sequence_of_a_mixed_step_is_read_its_own_way(monkeypatch):
    watched = Watched(MIXED, monkeypatch)
    out = watched.attend()
    assert sorted(watched.expanded) == [(3, 11), (6, 6)], "expanded: the sequences for which expanding_pays, alone"
    assert len(watched.absorbed) == 1, "one call of the kernel for all the others"
    asked = [pair for pair in watched.asked if pair[0] > 0]
    assert asked == [pair for pair in MIXED if pair[0] > 0], "expanding_pays decides, by q_len and kv_len of a sequence"
    watched.check(out, f"a step of {MIXED} (q_len, kv_len)")


@task
def test_the_kernel_gets_the_other_sequences_rows_and_tables(monkeypatch):
    watched = Watched(MIXED, monkeypatch)
    watched.attend()
    [call] = watched.absorbed
    starts, lens, table = (x.tolist() for x in call.batch)
    lengths = [pair for s, pair in enumerate(zip(map(int.__sub__, starts[1:], starts), lens, strict=True)) if pair[0]]
    assert lengths == [(1, 9), (1, 5), (2, 12)], "the kernel gets the sequences that are not expanded, in their order"
    assert call.rows == starts[-1], "the kernel gets their rows of q, and no other"
    rows = [row for row, begin, end in zip(table, starts, starts[1:], strict=False) if end > begin]
    assert rows == [watched.pool.table[s].tolist() for s in (0, 2, 5)], "each with its own row of the block table"


@task
@pytest.mark.parametrize(
    "lengths", [MIXED, [(6, 6), (3, 11)], [(2, 9), (2, 5)]], ids=["mixed", "all expanded", "all absorbed"]
)
def test_padded_rows_are_zero(lengths, monkeypatch):
    watched = Watched(lengths, monkeypatch)
    out = watched.attend(padding=3)
    assert list(out.shape) == [len(watched.q) + 3, HEADS, V], "a row for each row of q"
    zeros = not out[len(watched.q) :].any()
    assert zeros, "rows after the last sequence belong to none, and give zeros"
    watched.check(out, "with three rows of padding")


@task
def test_a_sequence_without_queries_has_no_rows(monkeypatch):
    watched = Watched([(4, 7), (0, 6), (5, 5)], monkeypatch)
    out = watched.attend()
    assert sorted(watched.expanded) == [(4, 7), (5, 5)], "nothing is expanded for a sequence without queries"
    watched.check(out, "the second of three sequences has no queries")


@task
def test_rows_are_widened_in_both_ways(monkeypatch):
    watched = Watched(MIXED, monkeypatch, pack=pack)
    out = watched.attend()
    histories = [tuple(unpack(pack(x), x.shape[1]) for x in history) for history in watched.pool.histories]
    watched.check(out, "a pool of rows", histories)


@task
@pytest.mark.parametrize("lengths", [[(6, 6), (3, 11)], MIXED], ids=["all expanded", "mixed"])
def test_the_answer_is_in_q_s_dtype(lengths, monkeypatch):
    watched = Watched(lengths, monkeypatch)
    watched.q, watched.kv_b = watched.q.bfloat16(), watched.kv_b.bfloat16()
    caches = watched.kv.kv
    caches.K[LAYER], caches.V[LAYER] = caches.K[LAYER].bfloat16(), caches.V[LAYER].bfloat16()
    out = watched.attend()
    assert out.dtype == torch.bfloat16, "in q's dtype, although expanded_attention answers in float32"


WRONG_SHAPES = [
    ((2, 1, ROPE), (2, 1, RANK)),  # the two exchanged
    ((2, 1, RANK), (2, 1, RANK)),
    ((2, 1, ROPE), (2, 1, ROPE)),
    ((3, 1, RANK), (2, 1, ROPE)),
    ((2, 1, RANK), (3, 1, ROPE)),
    ((2, RANK), (2, ROPE)),
    ((2, 4, RANK), (2, 4, ROPE)),
    ((2, 1, RANK), (1, 1, ROPE)),  # which torch would repeat
]


def test_latents_and_rotary_keys_are_written_into_their_slots():
    paged = KvPool(CONFIG, 4, BLOCK_SIZE, LatentKernel("reference", reference_attention))
    assert list(paged.K[LAYER].shape) == [4, BLOCK_SIZE, 1, RANK], "K holds latents"
    assert list(paged.V[LAYER].shape) == [4, BLOCK_SIZE, 1, ROPE], "V holds rotary keys, which have a size of their own"
    kv, (c, r) = LatentKv(CONFIG, paged), randoms((3, 1, RANK), (3, 1, ROPE))
    kv.set_kv(LAYER, torch.tensor([5, 6, 11]), c, r)
    assert torch.equal(paged.K[LAYER].flatten(0, 1)[[5, 6, 11]], c)
    assert torch.equal(paged.V[LAYER].flatten(0, 1)[[5, 6, 11]], r)
    assert kv.bytes == 2 * 4 * BLOCK_SIZE * (RANK + ROPE) * 4, "of a token, a latent and a rotary key in each layer"
    before = [
        layer.view(torch.int32).clone() for layer in (paged.K[LAYER], paged.V[LAYER])
    ]  # unwritten slots may be NaN
    for c, r in WRONG_SHAPES:
        with must_raise(ValueError, f"latents of {c} and rotary keys of {r}: each has a shape of its own") as caught:
            kv.set_kv(LAYER, torch.tensor([5, 6]), torch.ones(c), torch.ones(r))
        assert f"{(2, 1, RANK)} and {(2, 1, ROPE)}" in str(caught.value), "it says what both must be"
    now = [layer.view(torch.int32) for layer in (paged.K[LAYER], paged.V[LAYER])]
    assert all(map(torch.equal, now, before)), "nothing was written"
