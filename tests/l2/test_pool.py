"""Lesson 2. The pool: K and V are written to the given slots and read back in the given order."""

import pytest
import torch

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.kv.token_flat import FlatKvPool, FlatMeta, pool_slots
from tests.support import SMALL, must_raise, oracle, small_rows


def zeroed(num_slots=12):
    pool = FlatKvPool(SMALL, num_slots)
    for tensor in (*pool.K, *pool.V):
        tensor.zero_()
    return pool


def used(tensor):
    """Return the slots that hold anything but zeros."""
    return tensor.any(dim=(1, 2)).nonzero().flatten().tolist()


@pytest.mark.task(1)
def test_set_kv_writes_only_the_named_slots():
    pool, k, v = zeroed(), small_rows(3, seed=1), small_rows(3, seed=2)
    pool.set_kv(1, torch.tensor([9, 2, 4]), k, v)
    for name, tensor, given in (("k", pool.K[1], k), ("v", pool.V[1], v)):
        assert used(tensor) == [2, 4, 9], f"write {name} to the slots in slot_mapping, [9, 2, 4], and to no other"
        assert torch.equal(tensor[[9, 2, 4]], given), (
            f"row i of {name} belongs in slot slot_mapping[i]: {name}[0] in slot 9, {name}[1] in slot 2, {name}[2] in 4"
        )


@pytest.mark.task(1)
def test_set_kv_keeps_layers_apart():
    pool = zeroed()
    pool.set_kv(2, torch.tensor([0]), small_rows(1), small_rows(1))
    for name, layers in (("K", pool.K), ("V", pool.V)):
        written = [layer for layer, tensor in enumerate(layers) if tensor.any()]
        assert written == [2], (
            f"layer 2 was to be written: was the layer index forgotten? The layers whose {name} has changed"
        )


@pytest.mark.task(1)
def test_set_kv_writes_in_place_and_returns_nothing():
    pool = zeroed()
    before = [*pool.K, *pool.V]
    got = pool.set_kv(0, torch.tensor([0]), small_rows(1), small_rows(1))
    assert all(mine is kept for mine, kept in zip([*pool.K, *pool.V], before, strict=True)), (
        "write into the pool's tensors: a new tensor would copy the whole pool"
    )
    assert got is None, "set_kv changes the pool in place and returns nothing"


def nothing_was_written(pool):
    touched = sorted({*used(pool.K[0]), *used(pool.V[0])})
    assert touched == [], f"check everything before the first write: the refused call wrote slots {touched}"


@pytest.mark.task(1)
@pytest.mark.parametrize(
    "slots, k, v",
    [
        ([0, 1], small_rows(1), small_rows(1)),
        ([0], small_rows(2), small_rows(2)),
        ([0, 1], small_rows(2), small_rows(1)),
        ([0, 1], small_rows(1), small_rows(2)),
        ([0], torch.zeros(1, 2, 9), small_rows(1)),
        ([0], small_rows(1), torch.zeros(1, 1, 8)),
        ([0], torch.ones(1, 1, 8), torch.ones(1, 1, 8)),
    ],
    ids=[
        "one row, two slots",
        "two rows, one slot",
        "v too short",
        "k too short",
        "k too wide",
        "v of one head",
        "one head",
    ],
)
def test_set_kv_refuses_mismatched_shapes_and_writes_nothing(slots, k, v):
    pool = zeroed()
    shapes = f"k {list(k.shape)} and v {list(v.shape)}"
    with must_raise(ValueError, f"slots {slots}, {shapes}: both must be {[len(slots), 2, 8]}; torch may broadcast"):
        pool.set_kv(0, torch.tensor(slots), k, v)
    nothing_was_written(pool)


@pytest.mark.task(1)
@pytest.mark.parametrize("slots", [[0, 12], [-1, 3], [99, -7], [3, -12]])
def test_set_kv_refuses_a_slot_outside_the_pool_and_writes_nothing(slots):
    pool = zeroed(num_slots=12)
    why = f"slot_mapping is {slots}, and the pool has the slots 0 … 11: torch would take -1 for the last one"
    with must_raise(ValueError, why):
        pool.set_kv(0, torch.tensor(slots), small_rows(2), small_rows(2))
    nothing_was_written(pool)


@pytest.mark.task(1)
def test_set_kv_of_no_tokens_writes_nothing():
    pool = zeroed()
    try:
        pool.set_kv(0, torch.tensor([], dtype=torch.int64), small_rows(0), small_rows(0))
    except (RuntimeError, IndexError, ValueError) as error:
        error.add_note("a step of no tokens writes nothing, and is no mistake")
        raise
    nothing_was_written(pool)


@pytest.mark.task(1)
def test_set_kv_on_a_device_does_not_wait_to_check_the_slots():
    pool, nowhere = FlatKvPool(SMALL, 12, device="meta"), torch.zeros(2, 2, 8, device="meta")
    try:  # a tensor on device "meta" has no values: reading one raises, where a CUDA device would wait
        pool.set_kv(0, torch.tensor([0, 5]).to("meta"), nowhere, nowhere)
    except (RuntimeError, NotImplementedError) as error:
        error.add_note("slots on a device were read, and every layer would wait for it: leave the check to check_slots")
        raise


def scattered():
    """Return a pool with a history of five tokens in slots 7, 3, 0, 11, 5; every other slot is NaN."""
    pool, indices = FlatKvPool(SMALL, 12), torch.tensor([7, 3, 0, 11, 5])
    for layer in range(3):
        pool.K[layer].fill_(float("nan")), pool.V[layer].fill_(float("nan"))
        pool.K[layer][indices], pool.V[layer][indices] = small_rows(5, seed=layer), small_rows(5, seed=10 + layer)
    return pool, indices


@pytest.mark.task(7)
@pytest.mark.parametrize("q_len", [1, 2, 5])
def test_attend_reads_the_history_in_the_order_of_kv_indices(q_len):
    pool, indices = scattered()
    q = torch.randn(q_len, 4, 8, generator=torch.Generator().manual_seed(9))
    positions = torch.arange(5 - q_len, 5)
    meta = FlatMeta(positions, indices[5 - q_len :], indices, is_prefill=q_len > 1)
    want = oracle(q, small_rows(5, seed=0), small_rows(5, seed=10))
    got = pool.attend(0, q, meta)
    assert not got.isnan().any(), "attention read a slot that the request does not own: only those in kv_indices are"
    assert list(got.shape) == list(want.shape), "the result has q's shape, [T, H_q, D]"
    why = f"a history in slots {indices.tolist()}, in this order, and q for the last {q_len}: each sees up to itself"
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5, msg=lambda m: f"{why}\n{m}")


@pytest.mark.task(7)
def test_attend_reads_the_layer_it_is_asked_for():
    pool, indices = scattered()
    q = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(9))
    meta = FlatMeta(torch.tensor([4]), indices[4:], indices, is_prefill=False)
    for layer in range(3):
        want = oracle(q, small_rows(5, seed=layer), small_rows(5, seed=10 + layer))
        right = torch.allclose(pool.attend(layer, q, meta).double(), want, atol=1e-5)
        assert right, f"attend({layer}, …) must read K and V of layer {layer}: was the layer index forgotten?"


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
    assert FlatKvPool(SMALL, 12, dtype).bytes == 12 * SMALL.kv_bytes_per_token(dtype), "K and V, in the pool's dtype"


def test_a_budget_smaller_than_a_block_gives_no_slots():
    assert pool_slots(SMALL, torch.float32, 10) == 0
