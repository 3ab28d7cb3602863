"""Lesson 11. Lesson 10's device loop and recorded decode steps with states: a row of the table is its state's slot."""

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
from mini_engine.kv import pool_maker
from mini_engine.kv.block_tensor import KvPool
from tests.shared.gpu_helpers import Counting, TapeCapture, recordable
from tests.shared.hybrids import SELECTED, both, check_nothing_is_lost, checkpoint, greedy, hybrid
from tests.support import ask, check_answers, drain, some_ids

NEW, FAMILY = 8, "every fourth attends"
pytestmark = pytest.mark.reference  # no task is about this


def storage(family, rows=6, slots=6, page=4) -> DeviceKv:
    config = both(family)[0].config
    blocks = KvPool(kv_shape(config), 128 // page + 1, page, load_kernel("torch"))
    states = GdnPool.for_model(config, slots)
    states.recurrent_state[:] = float("nan")
    states.conv_state[:] = float("nan")
    table, allocator = ReqToTokenPool(rows, 24), TokenToKVPoolAllocator(128, page)
    return DeviceKv(table, allocator, SlotPool(blocks), HybridKv(blocks, states), RowStates(states))


def prompts_of(*lengths):
    return [tuple(some_ids(length, 160, seed=length)) for length in lengths]


@pytest.mark.parametrize("family", SELECTED)
def test_tokens_equal_hugging_face_s_and_rows_are_used_again(family):
    kv, asked = storage(family), prompts_of(1, 4, 5, 11)
    want = [greedy(family, prompt, NEW) for prompt in asked]
    assert generate_on_device(both(family)[0], kv, asked, NEW) == want
    assert generate_on_device(both(family)[0], kv, asked[::-1], NEW) == want[::-1], "a row begins with a state of zeros"
    assert kv.table.available_size() == 6 and kv.allocator.available_size() == 128


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


# ---------------------------------------------------------------- recorded


def test_recorded_steps_give_hugging_face_s_tokens_and_behind_checkpoints_too(monkeypatch):
    counting = Counting(TapeCapture())
    monkeypatch.setattr(pool_maker, "load_kernel", lambda *which, **cache: recordable)
    engine = hybrid(FAMILY, num_blocks=100, capture=counting)
    pool = engine.runner.pool
    for tensor in (pool.states.recurrent_state, pool.states.conv_state, *pool.kv.K, *pool.kv.V):
        tensor.fill_(float("nan"))
    for when in ("cold", "warm"):
        requests = ask(engine, prompts_of(1, 2, 9, 17, 33), 12, when)
        drain(engine)
        check_answers(requests, checkpoint(FAMILY), f"{when}, each row's state slot is read from the buffer")
    assert len(counting.replayed) > 12, "decode steps must be replayed"
    pool.states.recurrent_state.nan_to_num_(0)  # slots that were never handed out
    check_nothing_is_lost(engine)


def test_a_captured_device_loop_gives_the_same_tokens():
    kv, prompts = storage(FAMILY), prompts_of(1, 4, 11)
    kv.pool.blocks.kernel = recordable
    want = [greedy(FAMILY, prompt, NEW) for prompt in prompts]
    assert generate_on_device(both(FAMILY)[0], kv, prompts, NEW, capture=TapeCapture()) == want
