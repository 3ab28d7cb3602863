"""Lesson 15. Fast layers over a store in groups: layers with other slots, another table and a window, in one call.

That the tokens are Hugging Face's is tests/families/test_batched.py's; here each layer's slots are looked at, and those
that do not fit. Fused layers run with lesson 0's operations in place of a GPU's.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mini_engine.attention.registry import load_kernel
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.layers import speed_up
from mini_engine.layers.fused_layers import fuse
from mini_engine.model.kinds import Full, Window
from mini_engine.windows.store import GroupedKv, with_groups
from tests.shared import plain_kernels
from tests.shared.compiled import needs_compiler
from tests.support import random_model, refused, some_ids

BLOCK, NUM_BLOCKS = 4, 40
LENGTHS = (9, 1, 14)
LAYERS = (Full(), Window(6), Window(6), Full())  # places (0, 0), (1, 0), (1, 1) and (0, 1)

pytestmark = pytest.mark.reference  # no task is about this


def model_of(backend):
    """Return a random model with these layers; "reference" are lesson 0's."""
    model = random_model(num_hidden_layers=len(LAYERS))
    if backend != "fused":
        return model if backend == "reference" else speed_up(model, backend)

    def norm_rope(qkv, weights, cos, sin, eps, rows, k_out, v_out):
        assert rows.is_contiguous(), "Triton's kernel takes no stride: it reads the rows one after the other"
        return plain_kernels.norm_rope(qkv, weights, cos, sin, eps, rows, k_out, v_out)

    kernels: Any = SimpleNamespace(**vars(plain_kernels) | {"norm_rope": norm_rope})
    return fuse(model, kernels)


def store_of(model, direct=True):
    """Return a store full of NaN, which layers may write to themselves if it is direct."""
    pool = KvPool(replace(model.config, num_hidden_layers=2), NUM_BLOCKS, BLOCK, load_kernel("auto"))
    for x in (*pool.K, *pool.V):
        x.fill_(float("nan"))
    store = GroupedKv(LAYERS, pool)
    store.direct = direct
    return store


def plan(fed=LENGTHS, lengths=LENGTHS):
    """Plan to feed the last `fed[s]` of `lengths[s]` tokens; blocks differ between the groups."""
    order = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(3)) + 1
    first, second = order[: 2 * len(lengths) * 4].view(2, len(lengths), 4).int()
    positions = torch.cat([torch.arange(n - f, n) for n, f in zip(lengths, fed, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(fed))
    slots = first[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
    starts = F.pad(torch.tensor(fed).cumsum(0), (1, 0)).int()
    return with_groups(ForwardMeta(positions, slots, starts, torch.tensor(lengths).int(), first, BLOCK), [second])


@torch.inference_mode()
def run(model, store, sampled=True, plans=None):
    """Feed three prompts, and then a token each; return the logits of the last tokens in both steps."""
    found = []
    for meta in plans or (plan(), plan([1] * 3, [n + 1 for n in LENGTHS])):
        ids = torch.tensor(some_ids(len(meta.positions), model.config.vocab_size, seed=3))
        last = meta.cu_seqlens_q[1:].long() - 1
        found.append(model(ids, store, meta, rows=last) if sampled else model(ids, store, meta)[last])
    return torch.stack(found)


def same(got, want, why):
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5, equal_nan=True, msg=lambda text: f"{why}\n{text}")


each_backend = pytest.mark.parametrize("backend", ["torch", "fused", pytest.param("packed", marks=needs_compiler)])


@each_backend
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("sampled", [True, False], ids=["last rows", "all rows"])
def test_layers_over_groups_write_and_read_their_own_group_s_blocks(backend, direct, sampled, monkeypatch):
    calls, model, slow = [], model_of(backend), model_of("reference")
    store, theirs = store_of(model, direct), store_of(slow)
    want = run(slow, theirs)
    set_kv = store.set_kv
    monkeypatch.setattr(store, "set_kv", lambda *args: (calls.append(args[0]), set_kv(*args)))
    same(run(model, store, sampled), want, "the logits differ from the reference model's over the same store")
    for mine, its in zip((*store.kv.K, *store.kv.V), (*theirs.kv.K, *theirs.kv.V), strict=True):
        same(mine, its, "K and V must be in the slots of the layer's group, and nowhere else")
    writes_itself = direct and backend != "torch"
    assert calls == ([] if writes_itself else [0, 1, 2, 3] * 2), "packed and fused layers write to a direct store"


@pytest.mark.parametrize("backend", ["fused", pytest.param("packed", marks=needs_compiler)])
def test_a_plan_s_tensors_may_have_strides(backend):
    model, meta = model_of(backend), plan()
    wide = replace(
        meta, slot_mapping=meta.slot_mapping.T.contiguous().T, block_table=meta.block_table.mT.contiguous().mT
    )
    want, got = (run(model, store_of(model), plans=[one]) for one in (meta, wide))
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
        (lambda cache: dict(block_table=put(cache.block_table, -1, 2, 3)), "1 block_table 2"),
        (lambda cache: dict(slots=put(cache.slots, NUM_BLOCKS * BLOCK, 5)), f"1 {NUM_BLOCKS * BLOCK}"),
        (lambda cache: dict(slots=cache.slots.int()), "1 slot_mapping torch.int32"),
        (lambda cache: dict(block_table=cache.block_table.long()), "1 block_table torch.int64"),
        (lambda cache: dict(k=cache.k[:9], v=cache.v[:9], slots=torch.arange(24)), "1 [9, 4, 2, 16]"),
        (None, "3 4"),
    ],
    ids=["a block", "a slot", "slots in int32", "a table in int64", "a smaller cache", "too few layers"],
)
def test_what_does_not_fit_one_layer_is_refused_with_its_number(monkeypatch, change, values):
    """All tables are checked before the first layer runs: unchecked, C++ writes out of bounds."""
    model = model_of("packed")
    store = store_of(model)
    first, second, *others = store.layer_caches(plan())
    changed = [second._replace(**change(second))] if change else []
    monkeypatch.setattr(store, "layer_caches", lambda meta: [first, *changed, *others])
    with refused(ValueError, values):
        run(model, store)
    assert all(x.isnan().all() for x in (*store.kv.K, *store.kv.V))
