"""Lesson 5. The engine's seam: how its steps yield tokens. Here each chunk that samples yields one."""

from collections.abc import Iterable, Sequence

from mini_engine.engine.request import Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampling_params import SampleRow
from mini_engine.engine.scheduler import Chunk, Scheduler


class Decoding:
    """One token for each chunk that samples. A subclass may try several; an engine needs one of its own then.

    Attributes:
        num_drafted, num_accepted: tokens tried ahead in the latest step, and the steps that this saved.
    """

    num_drafted = num_accepted = 0

    def plan(self, scheduler: Scheduler) -> list[Chunk]:
        """Begin a step: return its chunks."""
        return scheduler.schedule()

    def sample_rows(self, chunks: Iterable[Chunk]) -> list[SampleRow]:
        """Return what the sampler reads of each row of logits: `num_samples` rows a chunk, in order."""
        return [chunk.request for chunk in chunks if chunk.samples]

    def standing(self, chunks: Iterable[Chunk], rows: Sequence[Sampled]) -> list[tuple[Request, Sampled]]:
        """Return the rows that count, each with its request. rows: what was sampled, one for each of `sample_rows`."""
        return list(zip((chunk.request for chunk in chunks if chunk.samples), rows, strict=True))

    def record(self, scheduler: Scheduler, chunks: Sequence[Chunk], rows: Sequence[Sampled]) -> dict[str, Sampled]:
        """Record a step that has run. Return request id to newest token."""
        return scheduler.update(chunks, rows)
