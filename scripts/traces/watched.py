"""Course machinery. An engine for a recorder: its manager, runner and decoding work, then tell what they did."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.runner import ModelRunner, plan_rows
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.scheduler import Chunk, Decoding
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.cache_coordinator import CacheCoordinator, cache_of
from mini_engine.kv.manager import KvCacheManager
from mini_engine.model.causal_lm import CausalLM


class Watcher(Protocol):
    """What is told."""

    def matched(self, name: str, found: int) -> None:
        """A request was admitted; so many of its tokens were found in the tree."""

    def grown(self, name: str, num_tokens: int, num_before: int) -> None:
        """A table got blocks, to hold so many tokens. It had num_before blocks."""

    def planned(self, chunks: Sequence[Chunk], slots: list[int]) -> None:
        """A step was planned; slots: where the K and V of each of its tokens are written."""

    def ran(self, chunks: Sequence[Chunk], num_rows: int) -> None:
        """The model ran, and returned so many rows of logits."""

    def sampled(self, rows: Sequence[tuple[Request, Sampled]]) -> None:
        """Tokens were chosen."""

    def stored(self, name: str, blocks: list[int]) -> None:
        """Blocks of a prompt were stored in the tree."""


class WatchedManager(KvCacheManager):
    """Lesson 8's manager."""

    def __init__(self, watcher: Watcher, num_blocks: int, block_size: int, copy) -> None:
        super().__init__(num_blocks, block_size, copy, CacheCoordinator)
        self.watcher, self.tree = watcher, cache_of(self).prefixes.tree

    def allocate(self, request_id, token_ids, *rest, **options):
        found = super().allocate(request_id, token_ids, *rest, **options)
        self.watcher.matched(request_id, found)
        return found

    def grow(self, request_id, num_tokens):
        before = len(self.tables[request_id].blocks)
        row = super().grow(request_id, num_tokens)
        if len(row) > before:
            self.watcher.grown(request_id, num_tokens, before)
        return row

    def commit(self, request_id, token_ids, num_computed):
        before = self.tree.num_blocks
        super().commit(request_id, token_ids, num_computed)
        count = self.tree.num_blocks - before
        if count:
            whole = num_computed // self.block_size
            self.watcher.stored(request_id, list(self.tables[request_id].blocks[whole - count : whole]))


class WatchedRunner(ModelRunner):
    """Lesson 5's runner."""

    def __init__(self, watcher: Watcher, model: CausalLM, pool: Any) -> None:
        super().__init__(model, pool, self.planned)
        self.watcher = watcher

    def planned(self, chunks, block_size, device):
        step = plan_rows(chunks, block_size, device)
        self.watcher.planned(chunks, step.meta.slot_mapping.tolist())
        return step

    def run(self, chunks):
        logits = super().run(chunks)
        self.watcher.ran(chunks, len(logits))
        return logits


class WatchedDecoding(Decoding):
    """Lesson 5's decoding."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def record(self, scheduler, chunks, rows):
        self.watcher.sampled(self.standing(chunks, rows))
        return super().record(scheduler, chunks, rows)


def watched_engine(watcher: Watcher, model: CausalLM, num_blocks: int, block_size: int) -> Engine:
    """Return an engine over a small pool, with a tree, whose parts tell `watcher`."""
    return Engine.for_model(
        model, num_blocks=num_blocks, block_size=block_size, kernel="reference",
        manager=partial(WatchedManager, watcher), runner=partial(WatchedRunner, watcher),
        decoding=WatchedDecoding(watcher), scheduler_config=SchedulerConfig(watermark=0),
    )  # fmt: skip
