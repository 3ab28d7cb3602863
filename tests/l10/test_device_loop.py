"""Lesson 10. The decode loop on the device: the same tokens, and everything is freed."""

import pytest
import torch

from lessons.l10_device.loop import DeviceKv, generate_on_device
from lessons.l10_device.pools import make_full_attention_net_mem_pool
from lessons.l10_device.req_to_token import ReqToTokenPool
from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import OutOfBlocks, UserError
from mini_engine.families.qwen3 import load_model
from mini_engine.gpu.graphs import CudaCapture, no_graph
from mini_engine.pocket import POCKET_DIR
from tests.shared.gpu_helpers import Counting, TapeCapture, recordable
from tests.support import FAMILIES, both, hf_greedy, some_ids

FAMILY = "two, tied, wide heads"
LENGTHS = [1, 4, 5, 11]
NEW = 8


def device_kv(config, size=128, page=4, kernel=None, max_reqs=6, device="cpu", dtype=torch.float32):
    options = {"page_size": page, "kernel": kernel or load_kernel("torch"), "device": device, "dtype": dtype}
    shapes = config.num_hidden_layers, *config.k_shape, *config.v_shape
    pool, allocator = make_full_attention_net_mem_pool(size, *shapes, **options)
    for tensor in (*pool.blocks.K, *pool.blocks.V):
        tensor[1:] = float("nan")
    return DeviceKv(ReqToTokenPool(max_reqs, 24, device), allocator, pool)


def test_an_allocator_for_other_pages_is_refused():
    kv = device_kv(both(FAMILY)[0].config, page=4)
    with pytest.raises(UserError):
        DeviceKv(kv.table, TokenToKVPoolAllocator(128, 8, device="cpu"), kv.pool)


def prompts_of(config):
    return [some_ids(length, config.vocab_size, seed=length) for length in LENGTHS]


def check_nothing_is_held(kv):
    assert kv.allocator.available_size() == kv.allocator.size, "slots leaked"
    assert kv.table.available_size() == kv.table.max_reqs, "rows leaked"
    assert not kv.table.req_to_token.any(), "a freed row still points at slots"


@pytest.mark.parametrize(
    "family, page",
    [
        pytest.param(family, page, marks=[pytest.mark.nightly] if page == 1 and family != FAMILY else [])
        for family in FAMILIES
        for page in (1, 4)
    ],
)
def test_tokens_equal_hugging_face_alone(family, page):
    model, hf = both(family)
    kv, prompts = device_kv(model.config, page=page), prompts_of(model.config)
    want = [hf_greedy(hf, prompt, NEW) for prompt in prompts]
    assert generate_on_device(model, kv, prompts, NEW) == want
    check_nothing_is_held(kv)
    assert generate_on_device(model, kv, prompts[::-1], NEW) == want[::-1], "reused slots must work like new ones"


def test_a_recorded_loop_gives_the_same_tokens():
    model, hf = both(FAMILY)

    kv, prompts = device_kv(model.config, kernel=recordable), prompts_of(model.config)
    counting = Counting(TapeCapture())
    got = generate_on_device(model, kv, prompts, NEW, capture=counting)
    assert got == [hf_greedy(hf, prompt, NEW) for prompt in prompts]
    assert counting.captured == 1 and len(counting.replayed) == NEW - 1, "a replay for each token after the first"


def test_an_answer_is_cut_behind_its_stop_token():
    model, hf = both(FAMILY)
    prompts = prompts_of(model.config)
    whole = [hf_greedy(hf, prompt, NEW) for prompt in prompts]
    stop = whole[0][3]
    got = generate_on_device(model, device_kv(model.config), prompts, NEW, stop_ids={stop})
    assert got == [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in whole]


def test_no_prompts_and_no_tokens():
    model = both(FAMILY)[0]
    kv = device_kv(model.config)
    assert generate_on_device(model, kv, [], 4) == [] and generate_on_device(model, kv, [[1], [2]], 0) == [[], []]
    assert [len(ids) for ids in generate_on_device(model, kv, [[1], [2, 3]], 1)] == [1, 1]


@pytest.mark.parametrize(("size", "max_reqs"), [(32, 6), (128, 3)], ids=["slots", "rows"])
def test_prompts_that_do_not_fit_leave_nothing_held(size, max_reqs):
    model = both(FAMILY)[0]
    kv = device_kv(model.config, size=size, max_reqs=max_reqs)
    with pytest.raises(OutOfBlocks):
        generate_on_device(model, kv, prompts_of(model.config), NEW)
    check_nothing_is_held(kv)


def test_a_prompt_that_no_row_can_hold_is_refused():
    model = both(FAMILY)[0]
    kv = device_kv(model.config)
    with pytest.raises(UserError):
        generate_on_device(model, kv, [[1], [2] * 18], NEW)
    with pytest.raises(UserError):
        generate_on_device(model, kv, [[1], []], NEW)
    check_nothing_is_held(kv)


def test_a_row_must_hold_the_whole_last_page():
    kv = device_kv(both(FAMILY)[0].config)
    kv = DeviceKv(ReqToTokenPool(6, 22), kv.allocator, kv.pool)
    with pytest.raises(UserError):
        kv.take(21)  # six pages of 4 are 24 slots, and a row has 22
    check_nothing_is_held(kv)
    row = kv.take(17)
    assert len(set(kv.table.read(row, 20).tolist())) == 20, "slots are allocated by the page: 17 tokens take 20"


def test_the_warm_up_of_a_capture_writes_into_padding_only():
    model, hf = both(FAMILY)
    kv, prompts = device_kv(model.config), prompts_of(model.config)
    row = kv.take(8)  # another request's
    slots = kv.table.read(row, 8).long()
    for tensor in (*kv.pool.blocks.K, *kv.pool.blocks.V):
        tensor.flatten(0, 1)[slots] = 7

    def runs_once(work):  # as a recording does; no_graph alone does not run it
        work()
        return work

    got = generate_on_device(model, kv, prompts, NEW, capture=runs_once)
    assert got == [hf_greedy(hf, prompt, NEW) for prompt in prompts]
    for tensor in (*kv.pool.blocks.K, *kv.pool.blocks.V):
        assert tensor.flatten(0, 1)[slots].eq(7).all(), "until `begin`, every row must be the padding row"


def test_an_error_during_capture_leaves_nothing_held():
    model = both(FAMILY)[0]
    kv = device_kv(model.config)

    def broken(work):
        raise LookupError("no graph today")

    with pytest.raises(LookupError):
        generate_on_device(model, kv, prompts_of(model.config), NEW, capture=broken)
    check_nothing_is_held(kv)


@pytest.mark.gpu
def test_a_captured_loop_gives_the_tokens_of_an_eager_one():
    model = load_model(POCKET_DIR, torch.bfloat16, "cuda")
    prompts = prompts_of(model.config)

    def answers(capture):
        kernel = load_kernel("triton", "cuda", torch.bfloat16)
        kv = device_kv(model.config, kernel=kernel, device="cuda", dtype=torch.bfloat16)
        return generate_on_device(model, kv, prompts, NEW, capture=capture)

    assert answers(CudaCapture()) == answers(no_graph)
