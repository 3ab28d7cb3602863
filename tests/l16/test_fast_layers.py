"""Lesson 16. Lesson 9's layers under latents: the logits of the reference layers, in one dtype or another."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.latents.fast import latent_decoder
from mini_engine.latents.model import latent_model
from mini_engine.latents.store import LatentKv
from mini_engine.layers import native, speed_up
from tests.l16.models import FAMILIES, load
from tests.l16.small import ROPE, SIZES, V, close, config_of, randoms
from tests.support import some_ids

BLOCK, NUM_BLOCKS = 4, 16
LENGTHS = (9, 1, 14)  # of the prompts of a step


def has_compiler():
    try:
        native.Functions(torch.float32)
    except UserError:
        return False
    return True


speed_up_latents = partial(speed_up, decoder=latent_decoder)
pytestmark = pytest.mark.reference
nightly = pytest.mark.nightly
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="NOT CHECKED: packed weights in C++; no compiler")
each_backend = pytest.mark.parametrize("backend", ["torch", pytest.param("packed", marks=needs_compiler)])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def store_for(model) -> LatentKv:
    """Return a store whose unwritten slots are NaN."""
    kernel = load_kernel("torch", "cpu", model.dtype, latents=True)
    pool = KvPool(model.config, NUM_BLOCKS, BLOCK, kernel, model.dtype)
    for layer in (*pool.K, *pool.V):
        layer.fill_(float("nan"))
    return LatentKv(model.config, pool)


def plan(lengths, fed):
    """Plan to feed the last `fed[s]` of the `lengths[s]` tokens of each sequence."""
    table = (torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(1)) + 1)[:12].view(3, 4).int()
    slots, positions = [], []
    for s, (length, count) in enumerate(zip(lengths, fed, strict=True)):
        own = torch.arange(length - count, length)
        positions.append(own)
        slots.append(table[s].long()[own // BLOCK] * BLOCK + own % BLOCK)
    starts = torch.tensor([0, *fed]).cumsum(0).int()
    return ForwardMeta(
        torch.cat(positions), torch.cat(slots), starts, torch.tensor(lengths, dtype=torch.int32), table, BLOCK
    )


@torch.inference_mode()
def logits(model):
    """Return the logits of all tokens of a prefill, then of the last rows of a decode step, and the store."""
    store, longer = store_for(model), [length + 1 for length in LENGTHS]
    whole = model(torch.tensor(some_ids(sum(LENGTHS), 160)), store, plan(LENGTHS, LENGTHS))
    meta = plan(longer, [1] * len(longer))
    step = model(torch.tensor([7, 8, 9]), store, meta, rows=torch.tensor([2, 0]))
    return whole, step, store


@each_backend
@each_dtype
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_reference_layers(family, backend, dtype):
    want_whole, want_step, theirs = logits(load(family, dtype))
    whole, step, store = logits(speed_up_latents(load(family, dtype), backend))
    assert whole.dtype == dtype and len(step) == 2, "of a decode step two rows were asked for"
    near = 1e-5 if dtype is torch.float32 else 0.06  # of the largest
    for got, want in ((whole, want_whole), (step, want_step)):
        assert (got - want).abs().max() <= near * want.abs().max()
    for mine, its in zip((*store.kv.K, *store.kv.V), (*theirs.kv.K, *theirs.kv.V), strict=True):
        assert torch.equal(mine.isnan(), its.isnan()), "latents are in the same slots, and nowhere else"


class Asked:
    """A store of one layer that notes what it is told and asked."""

    def set_kv(self, layer, slot_mapping, k, v):
        self.written = k, v

    def attend_latents(self, layer, q, kv_b, meta):
        self.q = q
        return torch.ones(*q.shape[:2], V)


@each_backend
@pytest.mark.parametrize("q_lora_rank", [None, 7])
def test_each_norm_keeps_its_own_eps(backend, q_lora_rank):
    """The config's eps is so large, and what is normed so small, that one in another's place would be noticed."""
    results = []
    for fast in (lambda model: model, partial(speed_up_latents, backend=backend)):
        layer, store = fast(small_model(rms_norm_eps=0.3, q_lora_rank=q_lora_rank)).model.layers[0], Asked()
        x = randoms((5, SIZES["hidden_size"]), seed=1)[0] / 10
        cos, sin = torch.ones(5, ROPE), torch.zeros(5, ROPE)
        results.append((layer(x, cos, sin, store, SimpleNamespace(slot_mapping=None)), store.q, *store.written))
    for got, want, what in zip(
        *reversed(results), ("the layer's result", "queries", "latents", "rotary keys"), strict=True
    ):
        close(got, want, f"{what}: a norm has another one's eps")


def small_model(**changes):
    """Return a random model, the same for the same changes."""
    model = latent_model(config_of(**changes)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for _, parameter in model.named_parameters():
        parameter.uniform_(-0.3, 0.3, generator=generator)
    return model
