"""Lesson 10. A step reaches the device in one copy, and a copy that is under way is not overwritten."""

from array import array
from dataclasses import dataclass, fields
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lessons.l10_device.loop import DeviceKv, plan_prefill
from lessons.l10_device.pools import make_full_attention_net_mem_pool, make_req_to_token_pool
from mini_engine.attention.registry import load_kernel
from mini_engine.engine.runner import ModelRunner, plan_step
from mini_engine.engine.scheduler import Chunk
from mini_engine.families.qwen3 import load_model
from mini_engine.gpu.graphs import CudaCapture, DecodeBuffers, GraphRunner, no_graph
from mini_engine.gpu.staging import ALIGNMENT, Staging, upload, uploaded
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.pocket import POCKET_DIR
from tests.shared.gpu_helpers import Decoding
from tests.support import both

FAMILY = "two, tied, wide heads"
CPU, META = torch.device("cpu"), torch.device("meta")


class Copies(TorchDispatchMode):
    """Notes each copy between the host and another device; here that is torch's meta device, which holds no numbers."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        before = {x.device.type for x in args if isinstance(x, torch.Tensor)}
        after = out.device.type if isinstance(out, torch.Tensor) else None
        if after == "meta" and "cpu" in before:
            self.bytes.append(out.nbytes)
        return out


def chunk_of(length, first_block, start=None):
    blocks = array("i", range(first_block, first_block - (-length // 4)))
    return Chunk(Decoding(length), length - 1 if start is None else start, length, blocks)


def small_buffers(device, max_rows=8, max_blocks=6):
    return DecodeBuffers(max_rows, max_blocks, 4, vocab_size=0, dtype=torch.float32, device=device)


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_decode_step_is_one_copy_of_the_bytes_that_its_rows_have(size):
    host, device = small_buffers(CPU), small_buffers(META)
    staging = Staging(host.tables, device.tables)
    with Copies() as copies, staging.filling(host.bytes_of(size)):
        host.fill(plan_step([chunk_of(5, 1 + 2 * i) for i in range(size)], 4, CPU), size)
    header = len(host.tables) - host.block_table.nbytes
    assert copies.bytes == [header + size * 6 * 4], "one copy: the short tables whole, and the block table's first rows"


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_copy_brings_all_that_the_host_filled(size):
    host, device = small_buffers(CPU), small_buffers(CPU)
    staging = Staging(host.tables, device.tables)
    for length in (17, 5):
        with staging.filling(host.bytes_of(size)):
            host.fill(plan_step([chunk_of(length, 1 + i) for i in range(size)], 4, CPU), size)
        for name in ("token_ids", "positions", "slot_mapping", "seq_lens_kv", "block_table"):
            assert torch.equal(getattr(device, name)[:size], getattr(host, name)[:size]), f"{name} has not arrived"
        assert torch.equal(device.cu_seqlens_q[: size + 1], host.cu_seqlens_q[: size + 1])


def test_prefills_and_mixed_steps_are_one_copy_too():
    step = plan_step([chunk_of(5, 1), chunk_of(9, 3, start=0)], 4, CPU)
    with Copies() as copies:
        moved = uploaded(step, META)
    assert len(copies.bytes) == 1, "token ids, rows and the five tables must move together"
    assert moved.meta.block_size == 4
    for was, now in [(step.token_ids, moved.token_ids), (step.rows, moved.rows)]:
        assert (was.shape, was.dtype, now.device.type) == (now.shape, now.dtype, "meta")


class Pair(NamedTuple):
    """Tensors within a plan's tuple, as lesson 11's stages are."""

    rows: Tensor
    slots: Tensor


@dataclass(frozen=True)
class NestedMeta(ForwardMeta):
    """A plan with tensors in tuples."""

    pairs: tuple[Pair, ...]


def test_tensors_in_a_plan_s_tuples_move_in_the_same_copy():
    step = plan_step([chunk_of(5, 1), chunk_of(9, 3, start=0)], 4, CPU)
    plain = {field.name: getattr(step.meta, field.name) for field in fields(step.meta)}
    pairs = tuple(Pair(torch.arange(n), torch.arange(n, 2 * n)) for n in (3, 1))
    step = step._replace(meta=NestedMeta(**plain, pairs=pairs))
    with Copies() as copies:
        moved = uploaded(step, META)
    assert {x.device.type for pair in moved.meta.pairs for x in pair} == {"meta"}, "tensors in a tuple stayed behind"
    assert len(copies.bytes) == 1
    for was, now in zip(pairs, uploaded(step, CPU).meta.pairs, strict=True):
        assert torch.equal(was.rows, now.rows) and torch.equal(was.slots, now.slots)


def test_the_runner_of_captured_steps_moves_each_step_once(monkeypatch):
    model = both(FAMILY)[0]
    pool = KvPool(model.config, 64, 4, load_kernel("torch"))
    runner, calls = GraphRunner(ModelRunner(model, pool), 8, no_graph), []
    runner.staging.sent = Noting(calls)
    monkeypatch.setattr("mini_engine.gpu.graphs.uploaded", lambda step, device: calls.append("step") or step)
    runner.run([chunk_of(5, 1), chunk_of(2, 3)])
    assert calls == ["wait", "copied"]
    runner.run([chunk_of(5, 1), chunk_of(9, 3, start=0)])
    assert calls[2:] == ["step"]


def test_the_device_loop_s_prompts_are_one_copy():
    pool, allocator = make_full_attention_net_mem_pool(16, 1, 1, 4, page_size=4, device=META)
    kv = DeviceKv(make_req_to_token_pool(2, 8, page_size=4, device=META), allocator, pool)
    rows = kv.table.alloc(2)
    with Copies() as copies:
        step, row_ids = plan_prefill(kv, rows, [[7, 8, 9], [5]])
    assert len(copies.bytes) == 1 and row_ids.device.type == step.token_ids.device.type == "meta"


@pytest.mark.parametrize("tensors", [[], [torch.arange(3), torch.arange(5).int(), torch.ones(2, 3), torch.zeros(0)]])
def test_uploaded_tensors_are_what_they_were(tensors):
    for was, now in zip(tensors, upload(tensors, CPU), strict=True):
        assert torch.equal(was, now) and was.dtype == now.dtype
        assert now.data_ptr() % ALIGNMENT == 0 or not now.numel(), "Triton compiles another kernel for odd addresses"


class Noting:
    """An event that notes when it is waited for and recorded."""

    def __init__(self, calls):
        self.calls = calls

    def synchronize(self):
        self.calls.append("wait")

    def record(self):
        self.calls.append("copied")


def test_the_host_waits_for_the_last_copy_before_it_writes():
    """A copy from pinned memory runs while the host goes on; what it has not read yet must not change."""
    host, device = torch.zeros(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    staging, calls = Staging(host, device), []
    staging.sent = Noting(calls)
    for number in (1, 2):
        with staging.filling(8):
            calls.append("write")
            host.fill_(number)
    assert calls == ["wait", "write", "copied"] * 2, "wait, then write, then copy and mark its end"
    assert device.tolist() == [2] * 8 + [0] * 8


def test_a_step_that_cannot_be_planned_is_not_copied():
    staging = Staging(torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ZeroDivisionError), staging.filling(4):
        staging.host.fill_(9)
        raise ZeroDivisionError
    assert not staging.device.any()


# On a GPU


@pytest.mark.gpu
def test_a_gpu_s_staging_is_pinned_and_the_copies_arrive():
    model = load_model(POCKET_DIR, torch.bfloat16, "cuda")
    kernel = load_kernel("triton", "cuda", torch.bfloat16)
    pool = KvPool(model.config, 64, 16, kernel, torch.bfloat16, "cuda")
    runner = GraphRunner(ModelRunner(model, pool), 8, CudaCapture())
    assert runner.host.tables.is_pinned() and isinstance(runner.staging.sent, torch.cuda.Event)
    tensors = [torch.arange(1000), torch.arange(77).int()]
    moved = upload(tensors, torch.device("cuda"))
    assert all(torch.equal(was, now.cpu()) for was, now in zip(tensors, moved, strict=True))
