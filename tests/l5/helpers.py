"""Lesson 5. Shared by the tests: a manager that only counts, and a model that stores token ids in place of KV."""

from array import array

import torch

from mini_engine.base.errors import OutOfBlocks
from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.coordinator import Cost, KvCoordinator
from mini_engine.kv.manager import BlocksByState, KvCacheManager

VOCAB = 40
EOS = 0


def greedy(max_tokens=8, **more):
    """Return parameters for greedy decoding."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def request_of(prompt_len, max_tokens=8, name="a", computed=0, outputs=(), stop_ids=(EOS,), priority=0):
    """Build a request by hand, with as much progress as the arguments say. Its prompt is 1, 2, 3, …"""
    request = Request(name, list(range(1, prompt_len + 1)), greedy(max_tokens), priority, stop_ids)
    for token in outputs:
        request.append(Sampled(token, None))
    request.num_computed_tokens = computed
    return request


class CountingManager:
    """The part of a manager that the scheduler uses, as counts. Block numbers start at 1 for each request.

    `cost` tells a prompt of `held_back` tokens to wait a step, until `held_back` is None. `log` has the calls that tell
    the manager something, `asked` those of `cost`.
    """

    fault = ""

    def __init__(self, usable=8, block_size=4, cached=0, held_back=None):
        self.num_usable_blocks, self.block_size, self.cached = usable, block_size, cached
        self.held_back = held_back
        self.held, self.log, self.asked = {}, [], []
        self.coordinator = KvCoordinator(usable + 1, block_size)

    @property
    def num_free_blocks(self):
        return self.num_usable_blocks - sum(self.held.values())

    @property
    def blocks_by_state(self):
        return BlocksByState(self.num_free_blocks, sum(self.held.values()))

    def holding(self, request, num_tokens):
        """Hold blocks for a request as if `grow` had been called."""
        self.held[request.id] = -(-num_tokens // self.block_size)
        return request

    def most_blocks(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def chunk_end(self, request_id, start, stop):
        return stop

    def cost(self, token_ids, num_tokens, namespace=None):
        self.asked.append((list(token_ids), num_tokens, namespace))
        return Cost(-(-num_tokens // self.block_size), should_wait=len(token_ids) == self.held_back)

    def allocate(self, request_id, token_ids, namespace=None):
        self.held[request_id] = -(-self.cached // self.block_size)
        return self.cached

    def missing_blocks(self, request_id, num_tokens):
        return max(0, -(-num_tokens // self.block_size) - self.held[request_id])

    def grow(self, request_id, num_tokens):
        missing = self.missing_blocks(request_id, num_tokens)
        if missing > self.num_free_blocks:
            raise OutOfBlocks(f"need {missing} blocks, {self.num_free_blocks} free of {self.num_usable_blocks}")
        self.held[request_id] += missing
        return array("i", range(1, self.held[request_id] + 1))

    def commit(self, request_id, token_ids, num_computed):
        assert request_id in self.held, (
            f"commit for {request_id!r}, which holds nothing: commit before the request ends"
        )
        self.log.append(("commit", request_id, list(token_ids[:num_computed])))

    def free(self, request_id, computed_ids=()):
        self.log.append(("free", request_id, list(computed_ids)))
        self.held.pop(request_id, None)


def scheduler_with(manager=None, running=(), waiting=(), **limits):
    """Return a scheduler with hand-made queues, oldest request first."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "chunked_prefill_size": 16, "watermark": 0} | limits
    scheduler = Scheduler(manager or CountingManager(), SchedulerConfig(**limits))
    scheduler.running, scheduler.waiting = list(running), list(waiting)
    for place, request in enumerate(sorted([*running, *waiting], key=lambda r: r.id)):
        request.arrival = place
        scheduler.requests[request.id] = request
    return scheduler


def spans(chunks):
    """Return chunks as (id, start, stop), which are easy to compare."""
    return [(chunk.request.id, chunk.start, chunk.stop) for chunk in chunks]


def by_id(chunks):
    """Return chunks as (id, start, stop), sorted by id: a step's chunks may come in any order."""
    return sorted(spans(chunks))


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
