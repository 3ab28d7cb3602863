"""Lesson 11. Lesson 10's replayed decode steps for a hybrid: a table more, with the state slot of every row."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from mini_engine.engine.runner import ModelRunner, int64
from mini_engine.engine.scheduler import Chunk
from mini_engine.gpu.graphs import CPU, Capture, CudaCapture, DecodeBuffers, GraphRunner, captured_or
from mini_engine.gpu.staging import Table, uploaded
from mini_engine.hybrid.gdn_pool import PADDING_SLOT
from mini_engine.hybrid.model import HybridForCausalLM
from mini_engine.hybrid.runner import HybridRunner, shallow
from mini_engine.hybrid.store import HybridKv, HybridMeta
from mini_engine.kv.block_tensor import KvPool


class HybridDecodeBuffers(DecodeBuffers):
    """Lesson 10's buffers, and state_slots `[max_rows]` int64: where each row's state is, 0 for padding."""

    def row_tables(self, max_rows: int) -> list[Table]:
        """As in lesson 10, with the state slots in front."""
        return [Table((max_rows,), torch.int64), *super().row_tables(max_rows)]

    def bind(self, views: Sequence[Tensor]) -> None:
        """As in lesson 10."""
        self.state_slots, *others = views
        super().bind(others)


class HybridGraphRunner(GraphRunner):
    """Lesson 10's runner for a hybrid. Rows of padding advance the state in slot 0, which is never handed out.

    Args:
        slot_of: names a running request's state slot, by request id.
    """

    make_buffers = HybridDecodeBuffers
    buffers: HybridDecodeBuffers
    host: HybridDecodeBuffers

    def __init__(
        self, model: HybridForCausalLM, pool: HybridKv, slot_of: Callable[[str], int], max_rows: int, capture: Capture
    ) -> None:
        self.eager = HybridRunner(model, pool, slot_of)
        super().__init__(model, cast(KvPool, pool), max_rows, capture)  # it asks only for the blocks' size and number

    def decode_of(self, size: int) -> Callable[[], None]:
        """As in lesson 10, with the first `size` state slots."""
        buffers = self.buffers
        meta = HybridMeta(**shallow(buffers.meta(size)), single_rows=None, single_slots=buffers.state_slots[:size])

        def decode() -> None:
            buffers.logits[:size].copy_(self.model(buffers.token_ids[:size], self.pool, meta))

        return decode

    def fill(self, chunks: Sequence[Chunk], size: int) -> None:
        """As in lesson 10, and the state slots."""
        super().fill(chunks, size)
        slots = [self.eager.slot_of(chunk.request.id) for chunk in chunks]
        self.host.state_slots[:size].copy_(int64(slots + [PADDING_SLOT] * (size - len(slots))))

    def run_eagerly(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run a step that is not replayed as in this lesson; its plan reaches the device in one copy."""
        step = uploaded(self.eager.plan(chunks, CPU), self.pool.device)
        return self.model(step.token_ids, self.pool, step.meta, rows=step.rows)


def captured(runner: ModelRunner, max_rows: int) -> ModelRunner:
    """Return a HybridGraphRunner on a GPU whose attention kernel can be recorded, and otherwise `runner` itself."""
    assert isinstance(runner, HybridRunner)  # `hybrid_engine` makes no other
    pool = runner.pool
    if pool.device.type == "cuda" and getattr(pool.kv.kernel, "name", None) == "triton":
        make = partial(HybridGraphRunner, runner.model, pool, runner.slot_of, max_rows)
        return captured_or(lambda: make(CudaCapture()), runner)
    return runner
