"""Lesson 2. The pool: K and V are written to the given slots and read back in the given order."""

import pytest
import torch

from mini_engine.config import Qwen3Config
from mini_engine.kv.token_flat import ForwardMeta, KvPool, pool_slots
from tests.support import oracle

CONFIG = Qwen3Config(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def rows(count, seed=0):
    return torch.randn(count, 2, 8, generator=torch.Generator().manual_seed(seed))


def zeroed(num_slots=12):
    pool = KvPool(CONFIG, num_slots)
    for tensor in (*pool.K, *pool.V):
        tensor.zero_()
    return pool


def test_set_kv_writes_only_the_named_slots():
    pool, k, v = zeroed(), rows(3, seed=1), rows(3, seed=2)
    pool.set_kv(1, torch.tensor([9, 2, 4]), k, v)
    assert torch.equal(pool.K[1][[9, 2, 4]], k), "row i of k belongs in slot slot_mapping[i]"
    assert torch.equal(pool.V[1][[9, 2, 4]], v), "row i of v belongs in slot slot_mapping[i]"
    others = [slot for slot in range(12) if slot not in (9, 2, 4)]
    assert not pool.K[1][others].any() and not pool.V[1][others].any(), "a slot that is not in slot_mapping has changed"


def test_set_kv_keeps_layers_apart():
    pool = zeroed()
    pool.set_kv(2, torch.tensor([0]), rows(1), rows(1))
    assert pool.K[2].any(), "nothing was written to layer 2: was the layer index forgotten?"
    assert not pool.K[0].any() and not pool.K[1].any(), "the wrong layer was written: was the layer index forgotten?"


def test_set_kv_returns_nothing():
    assert zeroed().set_kv(0, torch.tensor([0]), rows(1), rows(1)) is None, "set_kv changes the pool in place"


@pytest.mark.parametrize(
    "slots, k, v",
    [
        ([0, 1], rows(1), rows(1)),
        ([0], rows(2), rows(2)),
        ([0, 1], rows(2), rows(1)),
        ([0], torch.zeros(1, 2, 9), rows(1)),
        ([0], rows(1), torch.zeros(1, 1, 8)),
    ],
)
def test_set_kv_refuses_mismatched_shapes_and_writes_nothing(slots, k, v):
    pool = zeroed()
    with pytest.raises(ValueError):
        pool.set_kv(0, torch.tensor(slots), k, v)
    assert not pool.K[0].any() and not pool.V[0].any(), "the refused write was carried out in part"


@pytest.mark.parametrize("slots, stray", [([0, 12], 12), ([-1, 3], -1), ([99, -7], -7)])
def test_set_kv_refuses_a_slot_outside_the_pool_and_writes_nothing(slots, stray):
    pool = zeroed(num_slots=12)
    with pytest.raises(ValueError, match=str(stray)):
        pool.set_kv(0, torch.tensor(slots), rows(2), rows(2))
    assert not pool.K[0].any() and not pool.V[0].any(), "the refused write was carried out in part"


def test_set_kv_of_no_tokens_writes_nothing():
    pool = zeroed()
    pool.set_kv(0, torch.tensor([], dtype=torch.int64), rows(0), rows(0))
    assert not pool.K[0].any()


def test_set_kv_on_a_device_does_not_wait_to_check_the_slots():
    pool, nowhere = KvPool(CONFIG, 12, device="meta"), torch.zeros(2, 2, 8, device="meta")
    # a tensor on device "meta" has no values: reading one raises, where a CUDA device would wait
    pool.set_kv(0, torch.tensor([0, 5]).to("meta"), nowhere, nowhere)


def scattered():
    """Return a pool with a history of five tokens in slots 7, 3, 0, 11, 5; every other slot is NaN."""
    pool, indices = KvPool(CONFIG, 12), torch.tensor([7, 3, 0, 11, 5])
    for layer in range(3):
        pool.K[layer].fill_(float("nan")), pool.V[layer].fill_(float("nan"))
        pool.K[layer][indices], pool.V[layer][indices] = rows(5, seed=layer), rows(5, seed=10 + layer)
    return pool, indices


@pytest.mark.parametrize("q_len", [1, 2, 5])
def test_attend_reads_the_history_in_the_order_of_kv_indices(q_len):
    pool, indices = scattered()
    q = torch.randn(q_len, 4, 8, generator=torch.Generator().manual_seed(9))
    positions = torch.arange(5 - q_len, 5)
    meta = ForwardMeta(positions, indices[5 - q_len :], indices, is_prefill=q_len > 1)
    want = oracle(q, rows(5, seed=1), rows(5, seed=11))
    got = pool.attend(1, q, meta)
    assert not got.isnan().any(), "attention read a slot that the request does not own"
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_attend_reads_the_layer_it_is_asked_for():
    pool, indices = scattered()
    q = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(9))
    meta = ForwardMeta(torch.tensor([4]), indices[4:], indices, is_prefill=False)
    answers = [pool.attend(layer, q, meta) for layer in range(3)]
    assert not torch.allclose(answers[0], answers[1]), (
        "layers 0 and 1 gave the same answer: was the layer index forgotten?"
    )
    assert not torch.allclose(answers[1], answers[2]), (
        "layers 1 and 2 gave the same answer: was the layer index forgotten?"
    )


def test_qwen3_8b_in_bfloat16_takes_144_kib_per_token():
    qwen3_8b = Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    assert qwen3_8b.kv_bytes_per_token(torch.bfloat16) == 144 * 1024, "2 · 8 heads · 128 dims · 36 layers · 2 bytes"
    slots = pool_slots(qwen3_8b, torch.bfloat16, 14 * 2**30)
    assert slots == 101_936, f"{slots} slots; 14 GiB hold 101,936 slots in whole blocks of 16"
    assert slots * 144 * 1024 <= 14 * 2**30 < (slots + 16) * 144 * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pool_has_the_bytes_of_all_its_slots(dtype):
    assert KvPool(CONFIG, 12, dtype).bytes == 12 * CONFIG.kv_bytes_per_token(dtype), "K and V, in the pool's dtype"


def test_a_budget_smaller_than_a_block_gives_no_slots():
    assert pool_slots(CONFIG, torch.float32, 10) == 0
