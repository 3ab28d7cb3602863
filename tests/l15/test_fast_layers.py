"""Lesson 15. Fast layers over a store in groups: layers with other slots, another table and a window, in one call."""

import functools
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mini_engine.attention.contract import EVERY_KEY
from mini_engine.attention.registry import load_kernel
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.kv.direct import LayerCache
from mini_engine.layers import speed_up
from mini_engine.layers.fused_layers import fuse
from tests.shared import plain_kernels
from tests.shared.compiled import needs_compiler
from tests.support import random_model, refused, some_ids

BLOCK, NUM_BLOCKS, NEW = 4, 40, 6
LENGTHS = (9, 1, 14)
PLACES = ((0, 0), (1, 0), (1, 1), (0, 1))  # each layer's group, and its tensor in the pool
WINDOW = 6  # no multiple of the block size


pytestmark = pytest.mark.reference  # no task is about this


def attention(q, k_cache, v_cache, meta, table, window):
    """Attend with every key gathered and a mask: slow, and nothing like the kernels."""
    out = torch.zeros_like(q)
    for s, (begin, end) in enumerate(pairwise(meta.cu_seqlens_q.tolist())):
        length = int(meta.seq_lens_kv[s])
        keys = torch.arange(length)
        slots = table[s][keys // BLOCK].long() * BLOCK + keys % BLOCK
        own = torch.arange(length - (end - begin), length)[:, None]
        seen = (keys <= own) & (keys > own - window)
        k, v = (x.flatten(0, 1)[slots].nan_to_num(0).transpose(0, 1) for x in (k_cache, v_cache))  # holes may hold NaN
        out[begin:end] = F.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1), k, v, attn_mask=seen, enable_gqa=True
        ).transpose(0, 1)
    return out


class Grouped:
    """Four layers in two tensors. The layers of group 1 write to other blocks, and may have a window."""

    def __init__(self, config, window=EVERY_KEY, direct=True):
        self.kernel, self.direct = load_kernel("auto"), direct
        self.windows, self.calls = (EVERY_KEY, window), 0
        two = replace(config, num_hidden_layers=2)
        self.pool = KvPool(two, NUM_BLOCKS, BLOCK, self.kernel)
        for x in (*self.pool.K, *self.pool.V):
            x.fill_(float("nan"))

    def set_kv(self, layer, slot_mapping, k, v):
        self.calls += 1
        group, index = PLACES[layer]
        self.pool.set_kv(index, slot_mapping[group], k, v)

    def attend(self, layer, q, meta):
        group, index = PLACES[layer]
        k, v = self.pool.K[index], self.pool.V[index]
        return attention(q, k, v, meta, meta.block_table[group], self.windows[group])

    def layer_caches(self, meta):
        slots, tables = list(meta.slot_mapping), list(meta.block_table)
        return [LayerCache(self.pool.K[i], self.pool.V[i], slots[g], tables[g], self.windows[g]) for g, i in PLACES]

    @property
    def untouched(self):
        return all(x.isnan().all() for x in (*self.pool.K, *self.pool.V))


def plan(fed, lengths, window=EVERY_KEY):
    """Plan to feed the last `fed[s]` of the `lengths[s]` tokens of each sequence; blocks differ between the groups."""
    width = -(-(max(LENGTHS) + NEW) // BLOCK)
    order = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(3)) + 1
    tables = order[: 2 * len(lengths) * width].view(2, len(lengths), width).int()
    positions = torch.cat([torch.arange(n - f, n) for n, f in zip(lengths, fed, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(fed))
    slots = tables[:, owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
    for s, (n, f) in enumerate(zip(lengths, fed, strict=True)):  # holes behind the window of the first query
        tables[1, s, : max(0, n - f - window + 1) // BLOCK] = 0
    starts = F.pad(torch.tensor(fed).cumsum(0), (1, 0)).int()
    return ForwardMeta(positions, slots.contiguous(), starts, torch.tensor(lengths).int(), tables, BLOCK)


@torch.inference_mode()
def run(model, store, window=EVERY_KEY, sampled=True):
    """Answer three prompts greedily in one batch; return the tokens and the logits of every step."""
    texts = [some_ids(n, model.config.vocab_size, seed=n) for n in LENGTHS]
    fed, every = list(LENGTHS), []
    for _ in range(NEW):
        ids = torch.tensor([token for text, f in zip(texts, fed, strict=True) for token in text[-f:]])
        meta = plan(fed, [len(text) for text in texts], window)
        last = meta.cu_seqlens_q[1:].long() - 1
        logits = model(ids, store, meta, rows=last) if sampled else model(ids, store, meta)[last]
        every.append(logits)
        for text, row in zip(texts, logits, strict=True):
            text.append(int(row.argmax()))
        fed = [1] * len(LENGTHS)
    return [text[n:] for text, n in zip(texts, LENGTHS, strict=True)], torch.stack(every)


@functools.cache
def reference(window):
    """Return the tokens, the logits and the store of the reference layers."""
    model = random_model(num_hidden_layers=4)
    store = Grouped(model.config, window)
    return *run(model, store, window), store


def packed():
    return speed_up(random_model(num_hidden_layers=4), "packed")


def with_torch():
    return speed_up(random_model(num_hidden_layers=4), "torch")


def fused():
    """Return a model with lesson 10's fused layers, whose kernels are torch's operations."""

    def norm_rope(qkv, weights, cos, sin, eps, rows, k_out, v_out):
        assert rows.is_contiguous(), "Triton's kernel takes no stride: it reads the rows one after the other"
        return plain_kernels.norm_rope(qkv, weights, cos, sin, eps, rows, k_out, v_out)

    kernels: Any = SimpleNamespace(
        add_norm=plain_kernels.add_norm, norm_rope=norm_rope, silu_mul=plain_kernels.silu_mul
    )
    return fuse(random_model(num_hidden_layers=4), kernels)


def same(got, want, why):
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5, equal_nan=True, msg=lambda text: f"{why}\n{text}")


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


CASES = [(with_torch, True), (with_torch, False), (fused, True), (fused, False)]
CASES += [pytest.param(packed, direct, marks=needs_compiler) for direct in (True, False)]


@pytest.mark.parametrize("make, direct", CASES)
@pytest.mark.parametrize("window", [EVERY_KEY, WINDOW, 2], ids=["no window", "window 6", "window 2"])
@pytest.mark.parametrize("sampled", [True, False], ids=["last rows", "all rows"])
def test_layers_over_groups_give_the_reference_models_tokens(make, direct, window, sampled, threads):
    tokens, logits, theirs = reference(window)
    model = make()
    store = Grouped(model.config, window, direct)
    got_tokens, got = run(model, store, window, sampled)
    calls = 0 if direct and make is not with_torch else NEW * len(PLACES)
    assert store.calls == calls, "packed and fused layers write to a direct store themselves, all others ask the store"
    assert got_tokens == tokens, "each layer must write and read its own group's blocks, within its own window"
    same(got, logits, "the logits differ from the reference model's over the same store")
    for mine, its in zip((*store.pool.K, *store.pool.V), (*theirs.pool.K, *theirs.pool.V), strict=True):
        same(mine, its, "K and V must be in the slots of the layer's group, and nowhere else")


def test_without_the_window_the_tokens_are_others():
    assert reference(WINDOW)[0] != reference(EVERY_KEY)[0], "otherwise a lost window would go unnoticed"


@pytest.mark.parametrize("make", [pytest.param(packed, marks=needs_compiler), fused])
def test_a_plan_s_tensors_may_have_strides(make):
    model, meta = make(), plan(LENGTHS, LENGTHS)
    wide = replace(
        meta, slot_mapping=meta.slot_mapping.T.contiguous().T, block_table=meta.block_table.mT.contiguous().mT
    )
    ids = torch.tensor(some_ids(sum(LENGTHS), model.config.vocab_size))
    with torch.inference_mode():
        want, got = (model(ids, Grouped(model.config), plan) for plan in (meta, wide))
    assert torch.equal(got, want)


# ---------------------------------------------------------------- refused before anything is written


def put(tensor, value, *at):
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


@needs_compiler
@pytest.mark.parametrize(
    ("change", "values"),
    [
        *((lambda cache, n=n: dict(block_table=put(cache.block_table, n, 2, 3)), "1 block_table 2") for n in (-1, 40)),
        *((lambda cache, n=n: dict(slots=put(cache.slots, n, 5)), f"1 {n}") for n in (-1, NUM_BLOCKS * BLOCK)),
        (lambda cache: dict(slots=torch.arange(3)), "1 slot_mapping [3] [24]"),
        (lambda cache: dict(slots=cache.slots.int()), "1 slot_mapping torch.int32"),
        (lambda cache: dict(block_table=torch.ones(3, 3).int()), "1 2 14 block_table 12"),
        (lambda cache: dict(block_table=torch.ones(2, 9).int()), "1 block_table 3"),
        (lambda cache: dict(block_table=cache.block_table.long()), "1 block_table torch.int64"),
        (lambda cache: dict(k=cache.k[:9], v=cache.v[:9], slots=torch.arange(24)), "1 [9, 4, 2, 16]"),
    ],
    ids=[
        *("block -1", "block 40", "slot -1", "slot 160", "few slots", "slots in int32", "narrow table", "few rows"),
        *("table in int64", "a smaller cache"),
    ],
)
def test_what_does_not_fit_one_layer_is_refused_with_its_number(monkeypatch, change, values):
    """All tables are checked before the first layer runs: unchecked, C++ writes out of bounds."""
    model = packed()
    store, ids = Grouped(model.config), torch.tensor(some_ids(sum(LENGTHS), model.config.vocab_size))
    first, second, *others = store.layer_caches(plan(LENGTHS, LENGTHS))
    monkeypatch.setattr(store, "layer_caches", lambda meta: [first, second._replace(**change(second)), *others])
    with refused(ValueError, values), torch.inference_mode():
        model(ids, store, plan(LENGTHS, LENGTHS))
    assert store.untouched


@needs_compiler
@pytest.mark.parametrize("count", [0, 3])
def test_a_store_of_other_layers_is_refused(monkeypatch, count):
    model = packed()
    store = Grouped(model.config)
    caches = store.layer_caches(plan(LENGTHS, LENGTHS))[:count]
    monkeypatch.setattr(store, "layer_caches", lambda meta: caches)
    with refused(ValueError, f"{count} 4"):
        run(model, store)
    assert store.untouched
