"""Lesson 11. Lesson 10's device loop with states: a request's row in the table is its slot in the state pool."""

import pytest
import torch

from lessons.l10_device.loop import DeviceKv, generate_on_device
from lessons.l10_device.req_to_token import ReqToTokenPool
from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from lessons.l10_device.slot_pool import SlotPool
from lessons.l11_hybrid.row_states import RowStates
from mini_engine.assembly.layout import kv_shape
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.store import HybridKv
from mini_engine.kv.block_tensor import KvPool
from tests.l11.models import SELECTED, both, greedy
from tests.support import some_ids

LENGTHS, NEW = (1, 4, 5, 11), 8
pytestmark = pytest.mark.reference  # no task is about this

FAMILY = "every fourth attends"


def storage(family, rows=6, slots=6, page=4) -> DeviceKv:
    config = both(family)[0].config
    blocks = KvPool(kv_shape(config), 128 // page + 1, page, load_kernel("torch"))
    states = GdnPool.for_model(config, slots)
    states.recurrent_state[:] = float("nan")
    states.conv_state[:] = float("nan")
    table, allocator = ReqToTokenPool(rows, 24), TokenToKVPoolAllocator(128, page)
    return DeviceKv(table, allocator, SlotPool(blocks), HybridKv(blocks, states), RowStates(states))


def prompts():
    return [tuple(some_ids(length, 160, seed=length)) for length in LENGTHS]


@pytest.mark.parametrize("family", SELECTED)
def test_tokens_equal_hugging_face_s_and_rows_are_used_again(family):
    kv, asked = storage(family), prompts()
    want = [greedy(family, prompt, NEW) for prompt in asked]
    assert generate_on_device(both(family)[0], kv, asked, NEW) == want
    assert generate_on_device(both(family)[0], kv, asked[::-1], NEW) == want[::-1], "a row begins with a state of zeros"
    assert kv.table.available_size() == 6 and kv.allocator.available_size() == 128


def test_a_row_is_its_state_s_slot():
    kv = storage(FAMILY)
    rows = [kv.take(5), kv.take(3)]
    states = kv.store.states
    assert not states.recurrent_state[:, rows].any() and not states.conv_state[:, rows].any()
    others = [slot for slot in range(states.num_slots) if slot not in rows]
    assert states.recurrent_state[:, others].isnan().all(), "taking a row changes no other row's state"


def test_padding_rows_write_into_slot_0_only():
    model, kv = both(FAMILY)[0], storage(FAMILY)
    row = kv.take(3)
    rows, lengths = torch.tensor([row, 0, 0]), torch.tensor([1, 0, 0], dtype=torch.int32)
    meta = kv.memory.complete(kv.table.plan_decode(rows, lengths, kv.allocator.page_size), rows, None)
    with torch.inference_mode():
        logits = model(torch.tensor([7, 0, 0]), kv.store, meta)
    states = kv.store.states
    written = [slot for slot in range(states.num_slots) if not states.recurrent_state[:, slot].isnan().any()]
    assert set(written) <= {0, row} and row in written
    assert int(logits[0].argmax()) == greedy(FAMILY, (7,), 1)[0], "padding must not change a request's token"


def test_a_table_with_more_rows_than_slots_is_refused():
    with pytest.raises(UserError):
        storage(FAMILY, rows=7, slots=6)
