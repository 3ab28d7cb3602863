"""Lesson 5. Shared by the tests: a manager that only counts, requests and queues built by hand."""

from array import array

from mini_engine.base.errors import OutOfBlocks
from mini_engine.engine.request import Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.coordinator import Cost, KvCoordinator
from mini_engine.kv.manager import BlocksByState
from tests.stubs import EOS, StubRunner, expected_answer, greedy, spans, stub_config  # noqa: F401


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


def by_id(chunks):
    """Return chunks as (id, start, stop), sorted by id: a step's chunks may come in any order."""
    return sorted(spans(chunks))
