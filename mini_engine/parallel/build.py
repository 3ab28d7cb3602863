"""Lesson 13. An engine whose model is cut in shares: the same scheduler, manager and sampler, another runner.

Paging, batches, chunks, preemption and prefix sharing decide which tokens are fed and where K and V go. Those are
numbers, and the same ones in every rank: only the number of heads behind each slot is smaller.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mini_engine.engine.engine import Engine, PoolMaker
from mini_engine.engine.runner import ModelRunner, plan_step, with_prompt_rows
from mini_engine.engine.scheduler import Chunk
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.prefix_manager import PrefixCacheManager
from mini_engine.model.qwen3 import Qwen3ForCausalLM
from mini_engine.parallel.ranks import PoolSize, Ranks


class SharedRunner(ModelRunner):
    """Rank 0's runner: sends each step's plan to the other ranks, and runs its own share."""

    def __init__(self, model: Qwen3ForCausalLM, pool: KvPool, ranks: Ranks) -> None:
        super().__init__(model, pool)
        self.ranks = ranks

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run one forward pass over all ranks; return logits `[R, vocab_size]` as `ModelRunner.run` does.

        Raises:
            UserError: a rank has ended.
        """
        step = with_prompt_rows(plan_step(chunks, self.block_size, self.pool.device), chunks)
        try:
            self.ranks.send(step)
            return self.model(step.token_ids, self.pool, step.meta, rows=step.rows)
        except RuntimeError as error:
            raise self.ranks.as_error(error) from error


def parallel_engine(ranks: Ranks, **options: Any) -> Engine:
    """Return an engine over these ranks. options: those of `Engine.for_model`; the memory is each rank's.

    Raises:
        UserError: an option is invalid.
    """

    class SharePool(PoolMaker):
        """Makes the pools of all ranks, each for its share of the heads."""

        @property
        def bytes_per_token(self) -> int:
            return ranks.config.kv_bytes_per_token(self.model.dtype)

        def make(self, num_blocks: int, block_size: int, kernel: str) -> KvPool:
            size = PoolSize(num_blocks, block_size, kernel)
            pool = size.make(self.model, ranks.config)
            ranks.send(size)
            return pool

    engine = Engine.for_model(ranks.model, **{"manager": PrefixCacheManager, "pool": SharePool} | options)
    engine.runner = SharedRunner(ranks.model, engine.runner.pool, ranks)
    return engine
