"""Lesson 16. A step's mixer in one call of C++ computes and stores what the layers in plain torch do."""

import pytest
import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.latents.absorb import product
from mini_engine.latents.fast import latent_decoder
from mini_engine.latents.mixer import AbsorbedStep
from mini_engine.latents.model import latent_model
from mini_engine.latents.store import LatentKv
from mini_engine.layers import speed_up
from tests.shared.compiled import needs_compiler
from tests.shared.small_latents import BLOCK_SIZE, SIZES, close, config_of, randoms
from tests.support import refused

pytestmark = [pytest.mark.reference, needs_compiler]
LENGTHS = (5, 2, 9, 4)  # of the sequences, the fed token of each included; a row of no sequence follows
TABLE = [[7, 3, 0], [2, 0, 0], [4, 8, 6], [9, 0, 0]]


def plan() -> ForwardMeta:
    """Return the plan of a decode step with a padding row, whose slot is in the null block."""
    slots = [TABLE[s][(n - 1) // BLOCK_SIZE] * BLOCK_SIZE + (n - 1) % BLOCK_SIZE for s, n in enumerate(LENGTHS)]
    rows, lengths, table = (torch.tensor(list(x), dtype=torch.int32) for x in (range(5), LENGTHS, TABLE))
    positions = torch.tensor([n - 1 for n in LENGTHS] + [0])
    return ForwardMeta(positions, torch.tensor([*slots, 1]), rows, lengths, table, BLOCK_SIZE)


def random_model(**changes):
    """Return a random model, the same for the same changes."""
    model = latent_model(config_of(**changes)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for _, parameter in model.named_parameters():
        parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


def store_of(config, kernel) -> LatentKv:
    """Return a store full of random latents, the same for every kernel."""
    pool = KvPool(config, 10, BLOCK_SIZE, load_kernel(kernel, latents=True))
    generator = torch.Generator().manual_seed(1)
    for layer in (*pool.K, *pool.V):
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return LatentKv(config, pool)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("rope_interleave", [True, False])
@pytest.mark.parametrize("q_lora_rank", [None, 7])
def test_a_decode_step_is_what_plain_torch_computes_and_stores(monkeypatch, threads, q_lora_rank, rope_interleave):
    changes = dict(q_lora_rank=q_lora_rank, rope_interleave=rope_interleave, rms_norm_eps=0.3)
    config, tokens = config_of(**changes), torch.arange(5)
    want, told = store_of(config, "reference"), store_of(config, "cpu")
    states = random_model(**changes).model(tokens, want, plan())
    monkeypatch.setattr(LatentKv, "attend_latents", None)  # one call is all it takes
    got = speed_up(random_model(**changes), "packed", decoder=latent_decoder).model(tokens, told, plan())
    close(got[:4], states[:4], "the hidden states of the sequences", within=1e-4)
    for layer, (new, old) in enumerate(zip((*told.kv.K, *told.kv.V), (*want.kv.K, *want.kv.V), strict=True)):
        close(new[1:], old[1:], f"caches, {layer % 2}: latents are normed and rotary keys rotated", within=1e-4)


def test_rows_of_no_sequence_give_zeros_and_do_not_change_others():
    config, x = config_of(), torch.randn(5, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2))
    fast = speed_up(random_model(), "packed", decoder=latent_decoder).model
    mixer, whole = fast.layers[0].mixer, plan()
    cos, sin = fast.rope(whole.positions, x.dtype)
    out = mixer(x, cos, sin, store_of(config, "cpu").in_step(whole), whole)
    assert not out[4].any(), "attention of a row that belongs to no sequence is zero"
    for s in range(4):
        batch = (whole.seq_lens_kv[s : s + 1], whole.block_table[s : s + 1])
        starts = torch.tensor([0, 1], dtype=torch.int32)
        one = ForwardMeta(whole.positions[s : s + 1], whole.slot_mapping[s : s + 1], starts, *batch, BLOCK_SIZE)
        rows = slice(s, s + 1)
        alone = mixer(x[rows], cos[rows], sin[rows], store_of(config, "cpu").in_step(one), one)
        assert torch.equal(alone[0], out[s]), "a row's bits do not depend on its neighbours"


def test_a_step_that_expands_a_sequence_is_not_one_call():
    starts, lengths, table = (torch.tensor(x, dtype=torch.int32) for x in ([0, 9, 10], [9, 5], [[4, 8, 6], [7, 3, 0]]))
    meta = ForwardMeta(torch.arange(10), torch.arange(10) + BLOCK_SIZE, starts, lengths, table, BLOCK_SIZE)
    store = store_of(config_of(), "cpu")
    assert store.in_step(meta) is store and isinstance(store.in_step(plan()).absorbed_step, AbsorbedStep)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, inputs, outputs", [("to_latents", 33, 601), ("from_latents", 601, 33)])
def test_a_row_alone_has_the_bits_that_it_has_among_others(threads, name, inputs, outputs, dtype):
    shape = (33, 601)  # of a head's matrix, which one product uses by its rows, the other by its columns
    x, w = randoms((5, 2, inputs), (2, *shape), dtype=dtype)
    together = product(name, x, w, outputs)
    want = torch.einsum("thn,hnr->thr" if name == "to_latents" else "thr,hvr->thv", x.double(), w.double())
    assert torch.allclose(together.double(), want, rtol=1e-2, atol=1e-3 if dtype == torch.float32 else 0.3)
    for row in range(5):
        assert torch.equal(product(name, x[row : row + 1], w, outputs)[0], together[row])


def test_a_table_that_names_no_block_is_refused_before_anything_is_written():
    store, meta = store_of(config_of(), "cpu"), plan()
    meta.block_table[2, 1] = 10
    before = [x.clone() for x in (*store.kv.K, *store.kv.V)]
    fast = speed_up(random_model(), "packed", decoder=latent_decoder).model
    with refused(ValueError, "block_table row 2"):
        fast(torch.arange(5), store, meta)
    assert all(torch.equal(x, y) for x, y in zip((*store.kv.K, *store.kv.V), before, strict=True))
