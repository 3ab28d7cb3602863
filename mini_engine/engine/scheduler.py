"""Lesson 5. Who runs in the next step, and how many tokens of each. Numbers only: no tensors, no model.

A step is a list of chunks. Those who decode come first, a token each; what is left of the step's token budget goes to
prompts, in pieces as large as still fit, and then to requests that wait. The pool promises everybody it admits room for
all tokens that are known by then. Who decodes grows past that, a block at a time, and when the promises no longer fit,
the last come gives way: its blocks are freed, and it computes its tokens again later.

Steps as the unit of scheduling: Yu et al., Orca, 2022. Chunks beside decodes: Agrawal et al., Sarathi-Serve, 2024.
Preemption by computing again: Kwon et al., vLLM, 2023.
"""

from array import array
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.sampled import Sampled
from mini_engine.errors import UserError
from mini_engine.kv.manager import KvCacheManager

POLICIES = {"fcfs": attrgetter("arrival"), "priority": attrgetter("priority", "arrival")}


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of a step.

    max_num_seqs: requests that hold blocks at the same time.
    max_num_batched_tokens: tokens computed in one step; at least max_num_seqs, so that all who decode always can.
    chunked_prefill_size: tokens of one prompt computed in one step.
    watermark: blocks that an admission leaves free for each request that runs, because it will soon want one.
    reserve_answers: promise room for the whole answer. Nobody is preempted then, and fewer run at once.
    policy: "fcfs", first come first served, or "priority", smaller numbers first.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    chunked_prefill_size: int = 512
    watermark: float = 0.5
    reserve_answers: bool = False
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "chunked_prefill_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError(f"{name} is {value!r}; give a whole number of 1 or more")
        if not self.watermark >= 0:  # NaN is not
            raise UserError(f"watermark is {self.watermark}; give a number of 0 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_num_seqs {self.max_num_seqs}; "
                "every running request needs a token a step, so make the first at least the second"
            )
        if self.policy not in POLICIES:
            raise UserError(f"there is no policy {self.policy!r}; choose one of {', '.join(POLICIES)}")


class Chunk(NamedTuple):
    """Tokens start … stop - 1 of a request, to be computed in one step. `blocks` are the request's, in order."""

    request: Request
    start: int
    stop: int
    blocks: array

    @property
    def samples(self) -> bool:
        """It ends with the request's newest token, so its last row chooses the next one."""
        return self.stop == len(self.request.token_ids)


class Scheduler:
    """Queues and decisions. `waiting` and `running` are kept in the policy's order; the last who runs gives way first.

    One thread calls it. A request may be aborted at any time between two calls, a step in flight included.
    """

    def __init__(self, manager: KvCacheManager, config: SchedulerConfig | None = None) -> None:
        self.manager = manager
        self.config = config or SchedulerConfig()
        self.order = POLICIES[self.config.policy]
        self.requests: dict[str, Request] = {}  # all that have not finished
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.arrivals = count()
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises:
            UserError: it could never fit, even alone, or its id is in use; nothing was changed.
        """
        if request.id in self.requests:
            raise UserError(f"request id {request.id!r} is in use; give each unfinished request an id of its own")
        size, usable = self.manager.block_size, self.manager.num_usable_blocks
        need = -(-request.max_kv_tokens // size)
        if need > usable:
            raise UserError(
                f"{len(request.prompt_ids)} prompt tokens and {request.params.max_tokens} new ones need {need} blocks "
                f"of {size}; the whole pool has {usable}, so shorten the prompt or ask for fewer tokens"
            )
        request.arrival = next(self.arrivals)
        self.requests[request.id] = request
        insort(self.waiting, request, key=self.order)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, with room for them; empty if nobody has anything to compute."""
        spare = self.make_room()
        chunks = self.continue_running(self.config.max_num_batched_tokens)
        if self.waiting:
            used = sum(chunk.stop - chunk.start for chunk in chunks)
            chunks += self.admit(self.config.max_num_batched_tokens - used, spare)
        return chunks

    def promised_tokens(self, request: Request) -> int:
        """Tokens that a request is promised room for: those known now, or all to come."""
        return request.max_kv_tokens if self.config.reserve_answers else len(request.token_ids)

    def promised_blocks(self, request: Request) -> int:
        """Blocks that the pool still owes a running request."""
        return self.manager.missing_blocks(request.id, self.promised_tokens(request))

    def make_room(self) -> int:
        """Preempt the last come until the promises to those who run can be kept.

        Returns:
            free blocks that are promised to nobody.
        """
        while (spare := self.manager.num_free_blocks - sum(map(self.promised_blocks, self.running))) < 0:
            self.preempt(self.running[-1])
        return spare

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks. It waits again, in its old place, and will compute all its tokens anew."""
        self.running.remove(request)
        self.manager.free(request.id, request.computed_ids)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=self.order)

    def continue_running(self, budget: int) -> list[Chunk]:
        """Chunks for those who run: a token for each that decodes, then what is left for prompts, in order."""
        chunks, prompts = [], []
        for request in self.running:
            start, stop = request.num_computed_tokens, len(request.token_ids)
            if stop - start == 1:
                chunks.append(Chunk(request, start, stop, self.manager.grow(request.id, stop)))
            else:
                prompts.append(request)
        budget -= len(chunks)
        for request in prompts:
            if budget:
                chunks.append(self.chunk(request, budget))
                budget -= chunks[-1].stop - chunks[-1].start
        return chunks

    def chunk(self, request: Request, budget: int) -> Chunk:
        """The request's next tokens, as many as limits allow, and blocks to hold them."""
        start = request.num_computed_tokens
        stop = min(len(request.token_ids), start + min(budget, self.config.chunked_prefill_size))
        return Chunk(request, start, stop, self.manager.grow(request.id, stop))

    def admit(self, budget: int, spare: int) -> list[Chunk]:
        """First chunks for waiting requests, in order, while there is budget and `spare` blocks cover the promises.

        The first that does not fit ends it: none overtakes, so none waits for ever. A request that should wait a step
        stays at the head of the queue, and those behind it get only what is left once its room is set aside.
        """
        chunks, num_held = [], 0
        while budget > 0 and num_held < len(self.waiting) and len(self.running) + num_held < self.config.max_num_seqs:
            request = self.waiting[num_held]
            cost = self.manager.cost(request.token_ids, self.promised_tokens(request), request.namespace)
            if cost.num_blocks + self.config.watermark * (len(self.running) + num_held) > spare:
                break
            spare -= cost.num_blocks
            if cost.should_wait:
                num_held += 1
                continue
            self._start(request)
            chunks.append(self.chunk(request, budget))
            budget -= chunks[-1].stop - chunks[-1].start
        return chunks

    def _start(self, request: Request) -> None:
        request.num_computed_tokens = self.manager.allocate(request.id, request.token_ids, request.namespace)
        if request.num_preemptions == 0:
            request.num_cached_tokens = request.num_computed_tokens
        self.waiting.remove(request)
        insort(self.running, request, key=self.order)

    def update(self, chunks: Iterable[Chunk], sampled: Sequence[Sampled]) -> dict[str, Sampled]:
        """The step has run: its tokens have their KV, and each chunk that samples has chosen a token.

        Args:
            sampled: one for each chunk that samples, in order.

        Returns:
            request id to new token. Requests that the token ends are finished.
        """
        choices, new_tokens = iter(sampled), {}
        for chunk in chunks:
            request = chunk.request
            choice = next(choices) if chunk.samples else None
            if request.is_finished:  # aborted while the step ran
                continue
            request.num_computed_tokens = chunk.stop
            self.manager.commit(request.id, request.token_ids, chunk.stop)
            if choice is not None:
                request.append(choice)
                new_tokens[request.id] = choice
                if reason := request.params.finish_reason(request.output_ids, request.stop_ids):
                    self.finish(request, FinishReason(reason))
        return new_tokens

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End an unfinished request in whatever state it is, and give back all that it holds."""
        request.finish_reason, request.error = reason, error
        del self.requests[request.id]
        (self.running if request in self.running else self.waiting).remove(request)
        self.manager.free(request.id, () if reason == FinishReason.ERROR else request.computed_ids)

    def fail(self, requests: Iterable[Request], error: Exception) -> None:
        """End those of `requests` that have not ended yet with an error."""
        for request in requests:
            if not request.is_finished:
                self.finish(request, FinishReason.ERROR, f"{type(error).__name__}: {error}")
