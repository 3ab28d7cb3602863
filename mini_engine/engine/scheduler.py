"""Lesson 5. Chooses which requests run in the next step and how many tokens each one gets. No tensors, no model.

A step is a list of chunks. Decoding requests come first, one token each; the rest of the step's token budget goes to
prompts, in chunks as large as still fit, and then to waiting requests. A short prompt may overtake long ones. The pool
promises every request it admits room for all tokens known so far. Answers outgrow that promise block by block. When the
promises no longer fit, the newest running request is preempted: its blocks are freed, and its tokens are computed again
later.

Scheduling step by step: Yu et al., Orca, 2022. Chunks beside decodes: Agrawal et al., Sarathi-Serve, 2024.
Preemption by recomputation: Kwon et al., vLLM, 2023.
"""

from array import array
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from mini_engine.base.errors import EngineDead, TooLong, UserError
from mini_engine.base.values import shown
from mini_engine.engine.overtaking import overtakers
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampling_params import SampleRow
from mini_engine.engine.scheduler_config import POLICIES, SchedulerConfig
from mini_engine.kv.manager import KvCacheManager


class Chunk(NamedTuple):
    """Tokens start … stop - 1 of a request, computed in one step. `blocks` are all blocks of the request, in order."""

    request: Request
    start: int
    stop: int
    blocks: array

    @property
    def samples(self) -> bool:
        """True if it feeds the request's newest token, so that the logits of its last row choose the next one."""
        return self.stop == len(self.request.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The tokens that it feeds."""
        return self.request.token_ids[self.start : self.stop]

    @property
    def num_samples(self) -> int:
        """The number of its last rows that the sampler chooses a token from."""
        return int(self.samples)

    @property
    def num_logits(self) -> int:
        """The number of its last rows that need logits: those that sample, or all for a prompt's log probabilities."""
        return self.stop - self.start if self.request.needs_prompt_logprobs else self.num_samples


def keep_order(waiting: list[Request]) -> None:
    """Leave waiting requests in the policy's order."""


class Scheduler:
    """Queues and decisions. `waiting` and `running` are kept in the policy's order; preemption takes from the end.

    One thread calls it. A request may be aborted between any two calls, even while a step is in flight.

    Args:
        arrange: sorts `waiting` before each step that may admit some of them.
    """

    def __init__(
        self,
        manager: KvCacheManager,
        config: SchedulerConfig | None = None,
        arrange: Callable[[list[Request]], None] = keep_order,
    ) -> None:
        self.manager, self.arrange = manager, arrange
        self.config = config or SchedulerConfig()
        self.order = POLICIES[self.config.policy]
        self.requests: dict[str, Request] = {}  # all unfinished ones
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ahead: set[Request] = set()  # prompts that overtake others
        self.arrivals = count()
        self.num_scheduled = 0  # tokens of all steps so far
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Put a request in the waiting queue.

        Raises:
            UserError: it could not fit even alone (TooLong), or its id is in use; nothing was changed.
        """
        if request.id in self.requests:
            raise UserError(f"request id {shown(request.id)} is in use; give each unfinished request an id of its own")
        size, usable = self.manager.block_size, self.manager.num_usable_blocks
        need = self.manager.most_blocks(request.max_kv_tokens)
        if need > usable:
            raise TooLong(
                f"{len(request.prompt_ids)} prompt tokens and {request.params.max_tokens} new ones need {need} blocks "
                f"of {size}; the whole pool has {usable}, so shorten the prompt or ask for fewer tokens"
            )
        request.arrival, request.arrived_at = next(self.arrivals), self.num_scheduled
        self.requests[request.id] = request
        insort(self.waiting, request, key=self.order)

    def schedule(self) -> list[Chunk]:
        """Return the next step's chunks, with blocks for them; empty if there is nothing to compute."""
        spare = self.make_room()
        if self.waiting:
            self.arrange(self.waiting)
        spare = self.overtake(spare)
        chunks = self.continue_running(self.config.max_num_batched_tokens)
        if self.waiting:
            used = sum(chunk.stop - chunk.start for chunk in chunks)
            chunks += self.admit(self.config.max_num_batched_tokens - used, spare)
        self.num_scheduled += sum(chunk.stop - chunk.start for chunk in chunks)
        return chunks

    def reserved_tokens(self, request: Request) -> int:
        """Number of tokens that a request is promised room for: those known now, or all with `reserve_answers`."""
        return request.max_kv_tokens if self.config.reserve_answers else len(request.token_ids)

    def reserved_blocks(self, request: Request) -> int:
        """Number of blocks that the pool still owes a running request."""
        return self.manager.missing_blocks(request.id, self.reserved_tokens(request))

    def make_room(self) -> int:
        """Preempt the newest requests until the pool can keep its promises to the running ones.

        Returns:
            the number of free blocks that are promised to no request.
        """
        while (spare := self.manager.num_free_blocks - sum(map(self.reserved_blocks, self.running))) < 0:
            self.preempt(self.running[-1])
        return spare

    def preempt(self, request: Request) -> None:
        """Take back a running request's blocks. It waits in its old place and will compute all its tokens again.

        Its old place is where `order` puts it among the waiting requests. The manager is told which of its tokens had
        KV, `computed_ids`: a cache may keep them. The request and the scheduler each count one more preemption.
        """
        self.running.remove(request)
        self.manager.free(request.id, request.computed_ids)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=self.order)

    def overtake(self, spare: int) -> int:
        """Let short prompts go before longer ones in this step: they are `ahead`, and admitted if they wait.

        Returns:
            how many of the `spare` blocks are left.
        """
        self.ahead = {request for request in self.ahead if request.is_prefilling and request in self.running}
        for request, passed in overtakers(self, spare) if self.waiting and self.config.overtaking else ():
            if request in self.waiting:
                num_tokens = self.reserved_tokens(request)
                cost = self.manager.cost(request.token_ids, num_tokens, request.namespace)
                if cost.should_wait:
                    continue
                spare -= cost.num_blocks
                self._start(request)
            self.ahead.add(request)
            for other in passed:
                other.num_overtaken += request.num_uncomputed_tokens
        return spare

    def continue_running(self, budget: int) -> list[Chunk]:
        """Return chunks for running requests: one token for each that decodes; prompts share the rest.

        Prompts come in order, but those that are `ahead` before the others. No chunk is empty: a prompt for which no
        budget is left gets none. The chunks may come in any order.
        """
        chunks, prompts = [], []
        for request in self.running:
            start, stop = request.num_computed_tokens, len(request.token_ids)
            if stop - start == 1:
                chunks.append(Chunk(request, start, stop, self.manager.grow(request.id, stop)))
            else:
                prompts.append(request)
        budget -= len(chunks)
        for request in sorted(prompts, key=lambda request: request not in self.ahead):
            if budget:
                chunks.append(self.chunk(request, budget))
                budget -= chunks[-1].stop - chunks[-1].start
        return chunks

    def chunk(self, request: Request, budget: int) -> Chunk:
        """Return the request's next tokens, as many as the limits allow, with blocks to hold them."""
        start = request.num_computed_tokens
        stop = min(len(request.token_ids), start + min(budget, self.config.chunked_prefill_size))
        stop = self.manager.chunk_end(request.id, start, stop)
        return Chunk(request, start, stop, self.manager.grow(request.id, stop))

    def admit(self, budget: int, spare: int) -> list[Chunk]:
        """Admit waiting requests, in order, as long as budget is left and `spare` blocks cover the promises.

        Stop at the first one that does not fit: none overtakes it, so none waits forever. A request fits if `spare`
        covers its `cost` for `reserved_tokens`, and after that still `watermark` blocks for each request running beside
        it, those admitted in this step included. At most `max_num_seqs` run. `_start` admits one.

        A request that should wait a step (`cost.should_wait`) stays in its place in the queue and gets no chunk. What
        it needs is set aside before the next one is considered: it counts as admitted for blocks, seats and watermark,
        but takes no budget.

        Returns:
            the first chunk of each admitted request.
        """
        chunks, num_held = [], 0
        while budget > 0 and num_held < len(self.waiting) and len(self.running) + num_held < self.config.max_num_seqs:
            request = self.waiting[num_held]
            cost = self.manager.cost(request.token_ids, self.reserved_tokens(request), request.namespace)
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
        """Record a step that has run: its tokens now have KV, and each chunk that samples has a new token.

        `commit` tells the manager which of a request's tokens have KV, before the request can end. A token of
        `stop_ids` ends it with STOP, even if it is the last one allowed; token number `max_tokens` with LENGTH: ask
        the request, `reason_to_end`. One that was aborted while the step ran is left as it is, its token dropped.

        Args:
            sampled: one for each chunk that samples, in order.

        Returns:
            request id to new token, as in `sampled`. Requests that end with this token are finished, and are included.
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
                if reason := request.reason_to_end():
                    self.finish(request, reason)
        return new_tokens

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End an unfinished request, whatever its state, and free everything it holds.

        Raises:
            EngineDead: the request has ended, but not all that it held could be released (`manager.fault`).
        """
        request.finish_reason, request.error = reason, error
        del self.requests[request.id]
        queue = next((queue for queue in (self.running, self.waiting) if request in queue), None)
        if queue is not None:  # it is in neither if its preemption failed
            queue.remove(request)
        self.manager.free(request.id, () if reason == FinishReason.ERROR else request.computed_ids)

    def fail(self, requests: Iterable[Request], error: Exception) -> None:
        """End all unfinished `requests` with an error, also those behind one that cannot be released."""
        for request in requests:
            if not request.is_finished:
                with suppress(EngineDead):  # `manager.fault` says so
                    self.finish(request, FinishReason.ERROR, f"{type(error).__name__}: {error}")


class Decoding:
    """One token for each chunk that samples. A subclass may try several; then each engine needs its own instance.

    Attributes:
        num_drafted, num_accepted: tokens tried ahead in the latest step, and the steps that this saved.
    """

    num_drafted = num_accepted = 0

    def plan(self, scheduler: Scheduler) -> list[Chunk]:
        """Begin a step: return its chunks."""
        return scheduler.schedule()

    def sample_rows(self, chunks: Iterable[Chunk]) -> list[SampleRow]:
        """Return a SampleRow for each row of logits that samples: `num_samples` for each chunk, in order."""
        return [chunk.request for chunk in chunks if chunk.samples]

    def standing(self, chunks: Iterable[Chunk], rows: Sequence[Sampled]) -> list[tuple[Request, Sampled]]:
        """Return the rows that count, each with its request. rows: what was sampled, one for each of `sample_rows`."""
        return list(zip((chunk.request for chunk in chunks if chunk.samples), rows, strict=True))

    def record(self, scheduler: Scheduler, chunks: Sequence[Chunk], rows: Sequence[Sampled]) -> dict[str, Sampled]:
        """Record a step that has run. Return request id to newest token."""
        return scheduler.update(chunks, rows)
