"""Lesson 15. Fast layers over a store in groups: layers with other slots, another table and a window, in one call."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mini_engine.attention.contract import EVERY_KEY
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.kv.direct import LayerCache
from mini_engine.layers import native, speed_up
from mini_engine.layers.fused_layers import fuse
from tests.l10 import plain_kernels
from tests.support import random_model, refused, some_ids

BLOCK, NUM_BLOCKS, NEW = 4, 40, 6
LENGTHS = (9, 1, 14)
PLACES = ((0, 0), (1, 0), (1, 1), (0, 1))  # each layer's group, and its tensor in the pool
WINDOW = 6  # no multiple of the block size


def has_compiler():
    try:
        native.Functions(torch.float32)
    except UserError:
        return False
    return True


pytestmark = pytest.mark.reference  # no task is about this
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="NOT CHECKED: packed weights in C++; no compiler")


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


def reference(window=EVERY_KEY):
    model = random_model(num_hidden_layers=4)
    store = Grouped(model.config, window)
    return *run(model, store, window), store


def packed():
    return speed_up(random_model(num_hidden_layers=4), "packed")


def same(got, want, why):
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5, equal_nan=True, msg=lambda text: f"{why}\n{text}")


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("window", [EVERY_KEY, WINDOW, 2], ids=["no window", "window 6", "window 2"])
@pytest.mark.parametrize("sampled", [True, False], ids=["last rows", "all rows"])
def test_one_call_for_all_groups_gives_the_reference_models_tokens(window, sampled, threads):
    tokens, logits, theirs = reference(window)
    model = packed()
    store = Grouped(model.config, window)
    got_tokens, got = run(model, store, window, sampled)
    assert store.calls == 0, "a direct store with the C++ kernel is not called between the layers"
    assert got_tokens == tokens, "each layer must write and read its own group's blocks, within its own window"
    same(got, logits, "the logits differ from the reference model's over the same store")
    for mine, its in zip((*store.pool.K, *store.pool.V), (*theirs.pool.K, *theirs.pool.V), strict=True):
        same(mine, its, "K and V must be in the slots of the layer's group, and nowhere else")


def test_without_the_window_the_tokens_are_others():
    tokens, _, _ = reference()
    assert reference(WINDOW)[0] != tokens, "otherwise a lost window would go unnoticed"


@needs_compiler
def test_layer_by_layer_gives_the_same():
    tokens, logits, _ = reference(WINDOW)
    model = packed()
    store = Grouped(model.config, WINDOW, direct=False)
    got_tokens, got = run(model, store, WINDOW)
    assert store.calls == NEW * len(PLACES), "a store that is not direct writes every layer itself"
    assert got_tokens == tokens
    same(got, logits, "two calls a layer, with the store in between")


def plain_norm_rope(qkv, weights, cos, sin, eps, rows, k_out, v_out):
    assert rows.is_contiguous(), "Triton's kernel takes no stride: it reads the rows one after the other"
    return plain_kernels.norm_rope(qkv, weights, cos, sin, eps, rows, k_out, v_out)


def fused():
    kernels: Any = SimpleNamespace(
        add_norm=plain_kernels.add_norm, norm_rope=plain_norm_rope, silu_mul=plain_kernels.silu_mul
    )
    return fuse(random_model(num_hidden_layers=4), kernels)


def with_torch():
    return speed_up(random_model(num_hidden_layers=4), "torch")


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "asked"])
@pytest.mark.parametrize("make", [with_torch, fused])
def test_torch_layers_and_fused_layers_take_groups_too(make, direct):
    tokens, logits, _ = reference(WINDOW)
    model = make()
    store = Grouped(model.config, WINDOW, direct)
    got_tokens, got = run(model, store, WINDOW)
    assert got_tokens == tokens
    writes_itself = direct and make is fused
    assert bool(store.calls) != writes_itself, "fused layers write to a direct store themselves, torch's never do"
    same(got, logits, "the logits differ from the reference model's")


@pytest.mark.parametrize("make", [pytest.param(packed, marks=needs_compiler), fused])
def test_a_plan_s_tensors_may_have_strides(make):
    model = make()
    meta = plan(LENGTHS, LENGTHS)
    wide = replace(
        meta, slot_mapping=meta.slot_mapping.T.contiguous().T, block_table=meta.block_table.mT.contiguous().mT
    )
    ids = torch.tensor(some_ids(sum(LENGTHS), model.config.vocab_size))
    with torch.inference_mode():
        want, got = (model(ids, Grouped(model.config), plan) for plan in (meta, wide))
    assert torch.equal(got, want)


# ---------------------------------------------------------------- refused before anything is written


@pytest.fixture
def step():
    """Return a packed model, a store, and a call that runs one step with a changed plan."""
    model = packed()
    store, meta = Grouped(model.config), plan(LENGTHS, LENGTHS)
    ids = torch.tensor(some_ids(sum(LENGTHS), model.config.vocab_size))

    def call(**changes):
        for name, change in changes.items():
            changes[name] = change(getattr(meta, name).clone())
        with torch.inference_mode():
            return model(ids, store, replace(meta, **changes))

    return model, store, call


def put(value, *at):
    """Return a function that writes a value into a tensor."""

    def change(x):
        x[at] = value
        return x

    return change


@needs_compiler
@pytest.mark.parametrize("stray", [-1, NUM_BLOCKS])
def test_a_bad_table_of_the_second_group_is_refused_by_name(step, stray):
    _, store, call = step
    with refused(ValueError, "1 block_table 2"):
        call(block_table=put(stray, 1, 2, 3))
    assert store.untouched, "all tables are checked before the first layer runs"
    call(block_table=put(stray, 1, 1, 3))  # the second sequence has one key: what follows its block is not read


@needs_compiler
@pytest.mark.parametrize("stray", [-1, NUM_BLOCKS * BLOCK])
def test_slots_of_the_second_group_outside_the_pool_are_refused(step, stray):
    _, store, call = step
    with refused(ValueError, f"1 {stray}"):
        call(slot_mapping=put(stray, 1, 5))
    assert store.untouched, "unchecked, C++ writes out of bounds"


@needs_compiler
@pytest.mark.parametrize(
    "change, values",
    [
        (dict(slots=torch.arange(3)), "1 slot_mapping [3] [24]"),
        (dict(slots=torch.arange(24).int()), "1 slot_mapping torch.int32"),
        (
            dict(block_table=torch.ones(3, 3).int()),
            "1 2 14 block_table 12",
        ),
        (dict(block_table=torch.ones(2, 9).int()), "1 block_table 3"),
        (dict(block_table=torch.ones(3, 9).long()), "1 block_table torch.int64"),
        (dict(k=torch.zeros(9, BLOCK, 2, 16), v=torch.zeros(9, BLOCK, 2, 16)), "1 [9, 4, 2, 16]"),
    ],
    ids=["few slots", "slots in int32", "narrow table", "few rows", "table in int64", "a smaller cache"],
)
def test_what_does_not_fit_one_layer_is_refused_with_its_number(step, monkeypatch, change, values):
    _, store, call = step
    if "k" in change:  # this layer's tables are its own
        change = change | dict(slots=torch.arange(24))
    caches = store.layer_caches

    def changed(meta):
        first, second, *others = caches(meta)
        return [first, second._replace(**change), *others]

    monkeypatch.setattr(store, "layer_caches", changed)
    with refused(ValueError, values):
        call()
    assert store.untouched


@needs_compiler
@pytest.mark.parametrize("count", [0, 3])
def test_a_store_of_other_layers_is_refused(step, monkeypatch, count):
    _, store, call = step
    caches = store.layer_caches
    monkeypatch.setattr(store, "layer_caches", lambda meta: caches(meta)[:count])
    with refused(ValueError, f"{count} 4"):
        call()
    assert store.untouched


@needs_compiler
def test_layers_may_have_tables_of_other_widths(step, monkeypatch):
    _, store, call = step
    want = call()
    caches = store.layer_caches
    monkeypatch.setattr(
        store,
        "layer_caches",
        lambda meta: [
            cache if group else cache._replace(block_table=F.pad(cache.block_table, (0, 3)))
            for cache, (group, _) in zip(caches(meta), PLACES, strict=True)
        ],
    )
    assert torch.equal(call(), want)
