"""Lesson 14. Decoding with guesses: adds them to decode steps and takes back wrong ones.

Drafts get the leftovers. Chunks, reservations and admissions are decided as in lesson 5; only then may drafts use the
rest of the token budget and free blocks that are not reserved. A wrong draft's KV is truncated in the same step, so the
next step begins as if it had never been guessed.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from weakref import WeakKeyDictionary

from mini_engine.engine.request import Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampling_params import SampleRow
from mini_engine.engine.scheduler import Chunk, Decoding, Scheduler
from mini_engine.kv.manager import KvCacheManager
from mini_engine.kv.radix import RadixTree
from mini_engine.speculation.adapt import Adaptive, share_of_rows
from mini_engine.speculation.lookup import Drafter, LookupDrafter
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.tree_lookup import TreeDrafter
from mini_engine.speculation.verify import DraftChunk, num_emitted, sample_rows, with_drafts

log = logging.getLogger(__name__)


def speculator_of(speculation: Speculation, tree: RadixTree | None) -> "Speculator":
    """Return the Decoding of one engine: prompt lookup, after the tree if that is asked for.

    Args:
        tree: the manager's; None without prefix caching.
    """
    lookup = LookupDrafter(speculation)
    if tree is None or not speculation.use_tree:
        return Speculator(speculation, lookup)
    return Speculator(speculation, TreeDrafter(tree, lookup))


class Speculator(Decoding):
    """Guesses the next tokens of decoding requests and verifies them. One engine calls it, in the order of a step.

    Attributes:
        num_drafted, num_accepted: guesses of the latest step, and the steps that they saved: tokens that answers gained
            beyond the one that each step yields anyway.
    """

    def __init__(self, speculation: Speculation, drafter: Drafter) -> None:
        self.speculation, self.drafter = speculation, drafter
        self.adaptive: WeakKeyDictionary[Request, Adaptive] = WeakKeyDictionary()
        self.num_drafted = self.num_accepted = 0

    def plan(self, scheduler: Scheduler) -> list[Chunk]:
        """Return the step's chunks, with drafts for requests that decode, and slots for them.

        Drafts take the rest of the step's token budget, and free blocks that are not reserved.
        """
        chunks = scheduler.schedule()
        self.num_drafted = self.num_accepted = 0
        decoding = [chunk for chunk in chunks if chunk.samples and not chunk.request.is_prefilling]
        share = share_of_rows(self.speculation.max_rows, len(decoding))
        budget = scheduler.config.max_num_batched_tokens - sum(chunk.stop - chunk.start for chunk in chunks)
        if min(share, budget) <= 0:
            return chunks
        manager = scheduler.manager
        spare = manager.num_free_blocks - sum(map(scheduler.reserved_blocks, scheduler.running))
        extended: dict[Request, Chunk] = {}
        for chunk in decoding:
            request = chunk.request
            drafts = self.propose(request, min(share, budget))
            drafts = drafts[: self.num_fitting(manager, chunk, len(drafts), spare)]
            if drafts:
                spare -= manager.missing_blocks(request.id, chunk.stop + len(drafts))
                blocks = manager.grow(request.id, chunk.stop + len(drafts))
                manager.coordinator.announce_truncation(request.id, len(drafts))
                extended[request] = with_drafts(chunk._replace(blocks=blocks), drafts)
                budget -= len(drafts)
        return [extended.get(chunk.request, chunk) for chunk in chunks]

    def propose(self, request: Request, most: int) -> list[int]:
        """Return at most `most` drafts. The last token of an answer is never fed, so no draft could follow it.

        They stop before the first one that the request's grammar forbids or that would end the answer. If the drafter
        or the grammar fails, there are none: an answer does not need guesses.
        """
        room = request.params.max_tokens - len(request.output_ids) - 1
        wanted = min(self.adaptive_of(request).next(), most, room)
        try:
            drafts = self.drafter.propose(request, wanted) if wanted > 0 else []
            return drafts[: request.matcher.num_valid(drafts)]
        except NotImplementedError:  # an unimplemented task
            raise
        except Exception:
            log.exception("no guesses for request %s in this step", request.id)
            return []

    def adaptive_of(self, request: Request) -> Adaptive:
        """Return the Adaptive of a request."""
        return self.adaptive.setdefault(request, Adaptive(self.speculation.max_drafts))

    def num_fitting(self, manager: KvCacheManager, chunk: Chunk, count: int, spare: int) -> int:
        """Return how many of `count` drafts fit in the request's own blocks and `spare` more."""
        while count > 0 and manager.missing_blocks(chunk.request.id, chunk.stop + count) > spare:
            count -= 1
        return count

    def sample_rows(self, chunks: Iterable[Chunk]) -> list[SampleRow]:
        """Return the SampleRow of each row, in the order of the chunks."""
        return [row for chunk in chunks if chunk.samples for row in sample_rows(chunk.request, drafts_of(chunk))]

    def standing(self, chunks: Iterable[Chunk], rows: Sequence[Sampled]) -> list[tuple[Request, Sampled]]:
        """Return the rows that count: each row before them chose what was guessed."""
        found: list[tuple[Request, Sampled]] = []
        for chunk, own in each_with(chunks, rows):
            if own:
                count = num_emitted(drafts_of(chunk), [row.token_id for row in own])
                found += [(chunk.request, row) for row in own[:count]]
        return found

    def record(self, scheduler: Scheduler, chunks: Sequence[Chunk], rows: Sequence[Sampled]) -> dict[str, Sampled]:
        """Record a step: `accept` chunks with drafts, and update the scheduler with the others."""
        new_tokens: dict[str, Sampled] = {}
        for chunk, own in each_with(chunks, rows):
            if isinstance(chunk, DraftChunk):
                new_tokens |= self.accept(scheduler, chunk, own)
            else:
                new_tokens |= scheduler.update([chunk], own)
        return new_tokens

    def accept(self, scheduler: Scheduler, chunk: DraftChunk, rows: Sequence[Sampled]) -> dict[str, Sampled]:
        """Append one request's accepted tokens, one after the other, and truncate the KV of its other drafts.

        `scheduler.update` records the tokens, as one step each, ends the answer where it has to end, and drops the
        rest. A request that has ended or was aborted no longer has a table; other tables end up with slots for
        `num_computed_tokens` tokens.

        `num_drafted` grows by the number of drafts, `num_accepted` by the tokens that the answer gained, less one: a
        first draft that is the end token saved no step and does not count. The request's Adaptive records how many were
        guessed, and how many of them the rows chose before the first wrong one.

        Args:
            chunk: it feeds the request's newest token and its drafts.
            rows: one for the newest token, and one for each draft.

        Returns:
            request id to newest token, as `update` does; empty if the request was aborted.
        """
        request, drafts, before = chunk.request, chunk.drafts, len(chunk.request.output_ids)
        standing = num_emitted(drafts, [row.token_id for row in rows])
        ends = range(chunk.start + 1, chunk.start + 1 + standing)
        steps = [Chunk(request, end - 1, end, chunk.blocks) for end in ends]
        new_tokens = scheduler.update(steps, rows[:standing])
        self.num_drafted += len(drafts)
        self.num_accepted += max(0, len(request.output_ids) - before - 1)
        self.adaptive_of(request).record(len(drafts), standing - 1)
        if not request.is_finished and standing <= len(drafts):
            scheduler.manager.truncate(request.id, request.num_computed_tokens)
        return new_tokens


def drafts_of(chunk: Chunk) -> Sequence[int]:
    """Return a chunk's drafts; most have none."""
    return chunk.drafts if isinstance(chunk, DraftChunk) else ()


def each_with(chunks: Iterable[Chunk], rows: Sequence[Sampled]) -> Iterator[tuple[Chunk, list[Sampled]]]:
    """Yield each chunk with its sampled rows, `num_samples` of them."""
    left = iter(rows)
    for chunk in chunks:
        yield chunk, list(islice(left, chunk.num_samples))
