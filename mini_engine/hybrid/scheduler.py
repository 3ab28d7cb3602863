"""Lesson 11. Lesson 5's scheduler with chunks that end where the manager wants to checkpoint a state."""

from mini_engine.engine.request import Request
from mini_engine.engine.scheduler import Chunk, Scheduler
from mini_engine.hybrid.manager import HybridCacheManager


class HybridScheduler(Scheduler):
    """A Scheduler over a HybridCacheManager. Everything but the length of a chunk is lesson 5's."""

    manager: HybridCacheManager

    def chunk(self, request: Request, budget: int) -> Chunk:
        """As in lesson 5, but end at the next checkpoint: afterwards the state there would be gone."""
        start = request.num_computed_tokens
        stop = min(len(request.token_ids), start + min(budget, self.config.chunked_prefill_size))
        stop = self.manager.chunk_end(request.id, start, stop)
        return Chunk(request, start, stop, self.manager.grow(request.id, stop))
