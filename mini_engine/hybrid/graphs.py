"""Lesson 11. Lesson 10's replayed decode steps for a hybrid: a buffer more, with the state slot of every row."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from mini_engine.engine.runner import ModelRunner, int64
from mini_engine.engine.scheduler import Chunk
from mini_engine.gpu.graphs import Capture, CudaCapture, GraphRunner
from mini_engine.hybrid.gdn_pool import PADDING_SLOT
from mini_engine.hybrid.model import HybridForCausalLM
from mini_engine.hybrid.runner import HybridRunner, shallow
from mini_engine.hybrid.store import HybridKv, HybridMeta
from mini_engine.kv.block_tensor import KvPool


class HybridGraphRunner(GraphRunner):
    """Lesson 10's runner for a hybrid. Rows of padding advance the state in slot 0, which is never handed out.

    Args:
        slot_of: names a running request's state slot, by request id.
    """

    def __init__(
        self, model: HybridForCausalLM, pool: HybridKv, slot_of: Callable[[str], int], max_rows: int, capture: Capture
    ) -> None:
        self.eager = HybridRunner(model, pool, slot_of)
        self.slots = torch.full((max_rows,), PADDING_SLOT, dtype=torch.int64, device=model.device)
        super().__init__(model, cast(KvPool, pool), max_rows, capture)  # it asks only for the blocks' size and number

    def decode_of(self, size: int) -> Callable[[], None]:
        """As in lesson 10, with the first `size` state slots."""
        buffers = self.buffers
        meta = HybridMeta(**shallow(buffers.meta(size)), single_rows=None, single_slots=self.slots[:size])

        def decode() -> None:
            buffers.logits[:size].copy_(self.model(buffers.token_ids[:size], self.pool, meta))

        return decode

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """As in lesson 10; steps that are not replayed run as in this lesson."""
        if not self.is_decode(chunks):
            return self.eager.run(chunks)
        slots = [self.eager.slot_of(chunk.request.id) for chunk in chunks]
        self.slots.copy_(int64(slots + [PADDING_SLOT] * (len(self.slots) - len(slots))))
        return super().run(chunks)


def captured(runner: ModelRunner, max_rows: int) -> ModelRunner:
    """Return a HybridGraphRunner on a GPU whose attention kernel can be recorded, and otherwise `runner` itself."""
    assert isinstance(runner, HybridRunner)  # `hybrid_engine` makes no other
    pool = runner.pool
    if pool.device.type == "cuda" and getattr(pool.kv.kernel, "name", None) == "triton":
        return HybridGraphRunner(runner.model, pool, runner.slot_of, max_rows, CudaCapture())
    return runner
