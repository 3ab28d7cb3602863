"""Lesson 16. Latents in lesson 10's loop, and what cannot read them. `tests/families` has engines over latents."""

import pytest

from lessons.l10_device.loop import DeviceKv, generate_on_device
from lessons.l10_device.req_to_token import ReqToTokenPool
from lessons.l10_device.slot_allocator import TokenToKVPoolAllocator
from lessons.l10_device.slot_pool import SlotPool
from mini_engine.assembly.build import build_engine
from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.kv.block_tensor import KvPool
from mini_engine.latents.store import LatentKv
from tests.shared.latents import NEW, PROMPTS, checkpoint, load, model
from tests.support import hf_greedy, hugging_face, refused

pytestmark = pytest.mark.reference


def test_lesson_10s_loop_with_its_own_pool():
    config, page, size = model().config, 4, 304
    blocks = KvPool(config, size // page + 1, page, load_kernel("torch", latents=True))
    for layer in (*blocks.K, *blocks.V):
        layer.fill_(float("nan"))
    table, allocator = ReqToTokenPool(len(PROMPTS), 144), TokenToKVPoolAllocator(size, page)
    kv = DeviceKv(table, allocator, SlotPool(blocks), LatentKv(config, blocks))
    want = [hf_greedy(hugging_face(checkpoint()), list(ids), NEW) for ids in PROMPTS]
    for _ in range(2):
        assert generate_on_device(model(), kv, PROMPTS, NEW) == want
    assert allocator.available_size() == size, "all slots are free again"


def test_what_cannot_read_latents_says_so():
    with refused(UserError, "'triton' auto reference"):
        build_engine(load(), num_blocks=8, kernel="triton")
    with refused(UserError, "fused"):
        build_engine(load(), num_blocks=8, backend="fused")
