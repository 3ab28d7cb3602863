"""Lesson 14. Lesson 5's scheduler with drafts: it adds guesses to decode steps and takes back what was wrong.

Drafts get what is left over. Chunks, promises and admissions are decided as in lesson 5; only then may drafts use the
rest of the token budget and free blocks that are promised to no request. A wrong draft's KV is truncated in the same
step, so the next step begins as if it had never been guessed.
"""

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from mini_engine.engine.request import Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.scheduler import Chunk, Scheduler, SchedulerConfig
from mini_engine.kv.manager import KvCacheManager
from mini_engine.speculation.adapt import Adaptive, share_of_rows
from mini_engine.speculation.config import Speculation
from mini_engine.speculation.lookup import Drafter
from mini_engine.speculation.verify import can_speculate, num_standing


class SpeculatingScheduler(Scheduler):
    """A Scheduler whose decode chunks may carry drafts. Methods not overridden here behave as in lesson 5.

    Attributes:
        drafts: the guesses of the step that is being run, by request; the chunks themselves are lesson 5's.
        num_drafted, num_accepted: guesses of the latest step, and those that became tokens of an answer.
    """

    def __init__(
        self, manager: KvCacheManager, config: SchedulerConfig, speculation: Speculation, drafter: Drafter
    ) -> None:
        super().__init__(manager, config)
        self.speculation, self.drafter = speculation, drafter
        self.adaptive: WeakKeyDictionary[Request, Adaptive] = WeakKeyDictionary()
        self.drafts: dict[Request, list[int]] = {}
        self.num_drafted = self.num_accepted = 0

    def schedule(self) -> list[Chunk]:
        """As in lesson 5, with drafts for requests that decode. None in a step that tells a prompt's logprobs."""
        self.drafts, self.num_drafted, self.num_accepted = {}, 0, 0
        chunks = super().schedule()
        if not any(chunk.request.tells_prompt for chunk in chunks):
            self.add_drafts(chunks)
        return chunks

    def add_drafts(self, chunks: Sequence[Chunk]) -> None:
        """Fill `drafts`, within the step's token budget and the free blocks that are promised to no request."""
        decoding = [chunk for chunk in chunks if chunk.samples and not chunk.request.is_prefilling]
        share = share_of_rows(self.speculation.max_rows, len(decoding))
        budget = self.config.max_num_batched_tokens - sum(chunk.stop - chunk.start for chunk in chunks)
        if min(share, budget) <= 0:
            return
        spare = self.manager.num_free_blocks - sum(map(self.promised_blocks, self.running))
        for chunk in decoding:
            drafts = self.propose(chunk.request, min(share, budget))
            num_tokens = chunk.stop + self.num_fitting(chunk, len(drafts), spare)
            if num_tokens > chunk.stop:
                spare -= self.manager.missing_blocks(chunk.request.id, num_tokens)
                self.manager.grow(chunk.request.id, num_tokens)
                self.drafts[chunk.request] = drafts[: num_tokens - chunk.stop]
                budget -= num_tokens - chunk.stop

    def propose(self, request: Request, most: int) -> list[int]:
        """Return at most `most` drafts. The last token of an answer is never fed, so none could follow it."""
        if not can_speculate(request):
            return []
        room = request.params.max_tokens - len(request.output_ids) - 1
        wanted = min(self.adaptive_of(request).next(), most, room)
        return self.drafter.propose(request, wanted) if wanted > 0 else []

    def adaptive_of(self, request: Request) -> Adaptive:
        """Return how much is guessed for a request."""
        return self.adaptive.setdefault(request, Adaptive(self.speculation.max_drafts))

    def num_fitting(self, chunk: Chunk, count: int, spare: int) -> int:
        """Return how many of `count` drafts have room in the request's own blocks and `spare` more."""
        while count > 0 and self.manager.missing_blocks(chunk.request.id, chunk.stop + count) > spare:
            count -= 1
        return max(0, count)

    def update(self, chunks: Iterable[Chunk], sampled: Sequence[Sampled]) -> dict[str, Sampled]:
        """Record a step as lesson 5 would have recorded a step for each token that stands.

        So an answer ends at a stop id or at max_tokens wherever that is among them, and what follows is dropped. The
        KV of wrong drafts, and of what was dropped, is given up before anything can store it.

        Args:
            sampled: for each chunk that samples, in order, one for its own row and one for each of its drafts.

        Returns:
            request id to newest token.
        """
        if not self.drafts:
            return super().update(chunks, sampled)
        choices, new_tokens = iter(sampled), {}
        for chunk in chunks:
            drafts = self.drafts.get(chunk.request, [])
            rows = [next(choices) for _ in range(1 + len(drafts))] if chunk.samples else []
            new_tokens |= self.accept(chunk, drafts, rows) if drafts else super().update([chunk], rows)
        return new_tokens

    def accept(self, chunk: Chunk, drafts: Sequence[int], rows: Sequence[Sampled]) -> dict[str, Sampled]:
        """Append the tokens of `rows` that stand, one after the other, and truncate the KV of the others."""
        request, before = chunk.request, len(chunk.request.output_ids)
        standing = num_standing(drafts, [row.token_id for row in rows])
        steps = [chunk._replace(start=chunk.start + i, stop=chunk.stop + i) for i in range(standing)]
        new_tokens = super().update(steps, rows[:standing])
        self.num_drafted += len(drafts)
        self.num_accepted += max(0, len(request.output_ids) - before - 1)
        self.adaptive_of(request).record(len(drafts), standing - 1)
        if not request.is_finished and standing <= len(drafts):
            self.manager.truncate(request.id, request.num_computed_tokens)
        return new_tokens
