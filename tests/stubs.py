"""Course machinery. A model that stores token ids in place of KV, an engine around it, and the check of its books."""

import torch

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.manager import KvCacheManager

VOCAB = 40
EOS = 0


def greedy(max_tokens=8, **more):
    """Return parameters for greedy decoding."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def spans(chunks):
    """Return chunks as (id, start, stop), which are easy to compare."""
    return [(chunk.request.id, chunk.start, chunk.stop) for chunk in chunks]


def next_token(history):
    """Return the stub model's next token, which depends on every token of the history and its position."""
    total = 7
    for token in history:
        total = (total * 31 + token + 1) % 10_007
    return total % VOCAB


def expected_answer(prompt, max_tokens, stop_ids=(EOS,)):
    """Return the stub model's answer when it runs alone and without a cache."""
    history = list(prompt)
    while len(history) < len(prompt) + max_tokens:
        history.append(next_token(history))
        if history[-1] in stop_ids:
            break
    return history[len(prompt) :]


class StubRunner:
    """Replaces model and pool. Reading a slot that is unwritten or that another request wrote changes the answer.

    `during` is called once, while the next step is in flight.
    """

    fault = ""

    def __init__(self, block_size):
        self.block_size, self.slots, self.during = block_size, {}, None

    def run(self, chunks):
        for chunk in chunks:
            places = self.places(chunk, range(chunk.start, chunk.stop))
            self.slots.update(zip(places, chunk.request.token_ids[chunk.start : chunk.stop], strict=True))
        chosen = []
        for chunk in chunks:
            if chunk.samples:
                chosen.append(next_token([self.slots.get(s, -1) for s in self.places(chunk, range(chunk.stop))]))
        if self.during:
            during, self.during = self.during, None
            during()
        return torch.nn.functional.one_hot(torch.tensor(chosen, dtype=torch.int64), VOCAB).float()

    def places(self, chunk, positions):
        return [chunk.blocks[p // self.block_size] * self.block_size + p % self.block_size for p in positions]


def stub_config(max_positions=8192):
    """Return the configuration of a model that never runs."""
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=max_positions,
        eos_token_ids=(EOS,),
    )


def stub_engine(usable=16, block_size=4, max_positions=8192, **limits):
    """Return a real engine, scheduler and manager around the stub model."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "chunked_prefill_size": 16, "watermark": 0} | limits
    manager = KvCacheManager(usable + 1, block_size)
    scheduler = Scheduler(manager, SchedulerConfig(**limits))
    return Engine(stub_config(max_positions), scheduler, StubRunner(block_size))


def drain(engine, limit=2000):
    """Step until no request is left; return the finished ones by id."""
    finished = {}
    for _ in range(limit):
        if not engine.has_unfinished:
            return finished
        finished |= {request.id: request for request in engine.step().finished}
    raise AssertionError(f"after {limit} steps {len(engine.scheduler.requests)} requests have not finished")


def check_books(engine):
    """Check that free and held blocks make up the pool, none is shared, and only running requests hold any."""
    scheduler, manager = engine.scheduler, engine.scheduler.manager
    held = [block for table in manager.tables.values() for block in table.blocks]
    assert len(held) == len(set(held)), "two requests hold the same block"
    assert sorted(held + manager.allocator.free_blocks) == list(range(1, manager.num_usable_blocks + 1)), (
        f"free + held is not the pool: {len(held)} held, {manager.num_free_blocks} free of {manager.num_usable_blocks}"
    )
    running = {r.id for r in scheduler.running}
    assert set(manager.tables) == running, (
        f"{sorted(set(manager.tables) ^ running)} hold blocks without running, or run without a table: see preempt "
        "(task 3), admit (task 4) and update (task 5)"
    )
    for table in manager.tables.values():
        assert table.row.tolist() == table.blocks, "a table's row differs from its blocks"
    for queue in (scheduler.waiting, scheduler.running):
        assert [scheduler.order(r) for r in queue] == sorted(scheduler.order(r) for r in queue), (
            f"a queue is out of order, {[r.id for r in queue]}: see preempt (task 3) and admit (task 4)"
        )
    queued = sorted(r.id for r in [*scheduler.waiting, *scheduler.running])
    assert queued == sorted(scheduler.requests), (
        f"the queues have {queued}, unfinished are {sorted(scheduler.requests)}: each must be in one queue, once"
    )


def check_empty(engine):
    """Check that no request is left and no block is held."""
    check_books(engine)
    assert not engine.has_unfinished, f"{sorted(engine.scheduler.requests)} have not finished"
    assert engine.scheduler.manager.num_free_blocks == engine.scheduler.manager.num_usable_blocks, "blocks leaked"
