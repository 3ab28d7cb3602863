"""Lesson 13. An engine whose model is cut in shares: the same scheduler, manager and sampler, another runner.

Paging, batches, chunks, preemption and prefix sharing decide which tokens are fed and where K and V go. Those are
numbers, and the same ones in every rank: only the number of heads behind each slot is smaller.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mini_engine.engine.engine import Engine, PoolMaker
from mini_engine.engine.runner import ModelRunner, plan_step, with_prompt_rows
from mini_engine.engine.scheduler import Chunk
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.prefix_manager import PrefixCacheManager
from mini_engine.model.qwen3 import Qwen3ForCausalLM
from mini_engine.parallel.messages import Copy, PoolSize
from mini_engine.parallel.ranks import Ranks


class SharedRunner(ModelRunner):
    """Rank 0's runner: sends each step's plan to the other ranks, and runs its own share."""

    def __init__(self, model: Qwen3ForCausalLM, pool: KvPool, ranks: Ranks) -> None:
        super().__init__(model, pool)
        self.ranks = ranks

    @torch.inference_mode(False)  # with it, DTensor works out `linear` anew for each new number of tokens
    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run one forward pass over all ranks; return logits `[R, vocab_size]` as `ModelRunner.run` does.

        Raises:
            EngineDead: a rank has ended, or this one was interrupted within a step.
        """
        step = with_prompt_rows(plan_step(chunks, self.block_size, self.pool.device), chunks)
        with self.ranks.in_step():
            self.ranks.send(step)
            return self.model(step.token_ids, self.pool, step.meta, rows=step.rows)

    @property
    def fault(self) -> str:
        """Which rank is gone; empty as long as all are there."""
        return self.ranks.fault

    def close(self) -> None:
        """End the other ranks."""
        self.ranks.close()


class SharedPool(KvPool):
    """Rank 0's pool. What it copies, the others copy too. shape: as in KvPool, for a share of the heads."""

    def __init__(self, ranks: Ranks, *shape: Any) -> None:
        super().__init__(*shape)
        self.ranks = ranks

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As in lesson 3, in all ranks."""
        super().copy_blocks(sources, targets)
        with self.ranks.in_step():
            self.ranks.send(Copy(list(sources), list(targets)))


class SharedPoolMaker(PoolMaker):
    """Makes the pools of all ranks, each for its share of the heads."""

    def __init__(self, model: Qwen3ForCausalLM, ranks: Ranks) -> None:
        super().__init__(model)
        self.ranks = ranks

    @property
    def bytes_per_token(self) -> int:
        """Bytes that each rank's pool needs for one token."""
        return self.ranks.config.kv_bytes_per_token(self.model.dtype)

    def make(self, num_blocks: int, block_size: int, kernel: str) -> KvPool:
        """Return rank 0's pool; the others make theirs."""
        size = PoolSize(num_blocks, block_size, kernel)
        pool = size.make(self.model, self.ranks.config, partial(SharedPool, self.ranks))
        with self.ranks.in_step():
            self.ranks.send(size)
        return pool


def parallel_engine(ranks: Ranks, **options: Any) -> Engine:
    """Return an engine over these ranks. options: those of `Engine.for_model`; the memory is each rank's.

    Raises:
        UserError: an option is invalid.
    """
    maker = partial(SharedPoolMaker, ranks=ranks)
    engine = Engine.for_model(ranks.model, **{"manager": PrefixCacheManager, "pool": maker} | options)
    engine.runner = SharedRunner(ranks.model, engine.runner.pool, ranks)
    return engine
