"""Lesson 11. The state pool: shapes, slots, resets, copies, and the free list of checkpoints."""

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.hybrid.gdn_pool import PADDING_SLOT, GdnPool
from tests.shared.trees import refused

NAMES = ("recurrent", "convolution")
SHAPE = dict(num_gdn_layers=3, num_v_heads=4, head_k_dim=5, head_v_dim=7, conv_dim=11, conv_kernel_size=4)


def pool(max_reqs=2, max_track_slots=3, **changes) -> GdnPool:
    return GdnPool(max_reqs, **SHAPE | changes, max_track_slots=max_track_slots)


def filled(**changes) -> GdnPool:
    """A pool in which every number is different."""
    states = pool(**changes)
    for tensor in (states.recurrent_state, states.conv_state):
        tensor.copy_(torch.arange(1, tensor.numel() + 1).view(tensor.shape))
    return states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_recurrent_state_stays_in_float32_whatever_the_model_s_dtype(dtype):
    states = pool(dtype=dtype)
    assert states.recurrent_state.dtype == torch.float32, "it adds up thousands of tokens"
    assert states.conv_state.dtype == dtype
    assert states.recurrent_state.shape == (3, 6, 4, 5, 7), "[layers, slots, H_v, D_k, D_v]"
    assert states.conv_state.shape == (3, 6, 11, 3), "[layers, slots, conv_dim, K - 1]"
    assert states.mem_bytes == 3 * 6 * (4 * 5 * 7 * 4 + 11 * 3 * 2), "of both, where a slot is padding"


def test_a_layer_s_states_are_views():
    states = pool()
    for tensor, view in zip((states.recurrent_state, states.conv_state), states.get_layer_state(1), strict=True):
        view[2] = 1.0
        assert (tensor[1, 2] == 1).all(), "return views, not copies"
        assert not tensor[[0, 2]].any()
    for layer in (-1, 3):
        with pytest.raises(IndexError):
            states.get_layer_state(layer)


@pytest.mark.task(3)
@pytest.mark.parametrize(
    "slots", [[2], [1, 4], [PADDING_SLOT, 3], torch.tensor([5, 2]), torch.tensor([3], dtype=torch.int32)]
)
def test_a_reset_zeroes_these_slots_in_every_layer_and_no_others(slots):
    states = filled()
    before = states.recurrent_state.clone(), states.conv_state.clone()
    states.reset_states(slots)
    gone = {int(slot) for slot in slots}
    kept = [slot for slot in range(states.num_slots) if slot not in gone]
    for name, tensor, was in zip(NAMES, (states.recurrent_state, states.conv_state), before, strict=True):
        for slot in gone:
            assert not tensor[:, slot].any(), f"reset_states({sorted(gone)}): slot {slot} still has a {name} state"
        assert torch.equal(tensor[:, kept], was[:, kept]), f"reset_states({sorted(gone)}) changed another {name} state"


@pytest.mark.task(3)
def test_resetting_nothing_changes_nothing():
    states = filled()
    states.reset_states([])
    states.reset_states(torch.tensor([], dtype=torch.int64))
    assert states.recurrent_state.all()


@pytest.mark.task(3)
@pytest.mark.parametrize("wrong", [6, -1])
def test_a_reset_outside_the_pool_is_refused(wrong):
    states = filled()
    with refused(f"reset_states([1, {wrong}]) must raise ValueError: the pool has slots 0 … 5"):
        states.reset_states([1, wrong])
    assert states.recurrent_state.all(), "nothing may be reset if one slot is wrong: check all of them first"


@pytest.mark.task(3)
def test_a_copy_covers_every_layer_and_both_states():
    states = filled()
    before = states.recurrent_state.clone(), states.conv_state.clone()
    states.copy_states(1, 4)
    for tensor, was in zip((states.recurrent_state, states.conv_state), before, strict=True):
        assert torch.equal(tensor[:, 4], was[:, 1]), "every layer's state must be copied, recurrent and conv"
        assert torch.equal(tensor[:, 1], was[:, 1]), "the source keeps its state"
        assert torch.equal(tensor[:, [0, 2, 3, 5]], was[:, [0, 2, 3, 5]]), "no other slot may change"


@pytest.mark.task(3)
def test_a_copy_is_no_view():
    states = filled()
    states.copy_states(1, 4)
    kept = states.recurrent_state[:, 4].clone()
    states.reset_states([1])
    assert torch.equal(states.recurrent_state[:, 4], kept), "a checkpoint must not change when its source does"


@pytest.mark.task(3)
@pytest.mark.parametrize("source, target", [(1, 6), (-1, 2), (9, 1), (1, PADDING_SLOT)])
def test_a_copy_outside_the_pool_or_into_padding_is_refused(source, target):
    states = filled()
    before = states.recurrent_state.clone()
    with refused(f"copy_states({source}, {target}) must raise ValueError: states go from slots 0 … 5 to slots 1 … 5"):
        states.copy_states(source, target)
    assert torch.equal(states.recurrent_state, before), "a refused copy must write nothing"


@pytest.mark.task(3)
def test_a_reset_and_a_copy_write_into_the_pool_s_own_tensors():
    states = filled()
    layers = [states.get_layer_state(layer) for layer in range(3)]
    states.reset_states([1])
    states.copy_states(2, 3)
    for recurrent, conv in layers:
        why = "write in place: views of a layer, and recorded steps, go on reading the tensors that the pool began with"
        assert not recurrent[1].any() and not conv[1].any(), why
        assert torch.equal(recurrent[3], recurrent[2]) and torch.equal(conv[3], conv[2]), why


def test_track_slots_lie_behind_the_working_slots_and_run_out_with_none():
    assert pool(max_track_slots=0).alloc_track_slot() is None
    states = pool()
    slots = [states.alloc_track_slot() for _ in range(3)]
    assert sorted(slots) == [3, 4, 5], "slot 0 is padding, 1 and 2 are working slots"
    assert states.alloc_track_slot() is None, "None says that none is free; it is not an error"
    states.free_track_slot(4)
    for slot in (0, 1, 2, 4, 6, -1):  # 4 is free already
        with pytest.raises(ValueError):
            states.free_track_slot(slot)
    assert states.free_track_slots == [4] and states.alloc_track_slot() == 4


@pytest.mark.parametrize("max_reqs, track", [(0, 1), (-1, 0), (1, -1)])
def test_impossible_sizes_are_refused(max_reqs, track):
    with pytest.raises(UserError):
        pool(max_reqs, track)
