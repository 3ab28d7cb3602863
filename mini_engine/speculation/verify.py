"""Lesson 14. Verification: one step computes the logits after every guess, and decides how many are accepted.

A request feeds its newest token and k drafts in one chunk of 1 + k rows. Row i sees the first i drafts, so its logits
are those of an ordinary step for an answer with these tokens. The sampler chooses a token from each row:

    fed     x    d1   d2   d3          x: the newest token; d1 … d3: the drafts
    chosen  c0   c1   c2   c3          c0 is always right; c1 only if d1 = c0, and so on

The drafts before the first wrong one are the answer's next tokens, and the token chosen in its place is one more: a
step yields 1 to k + 1 tokens. This holds for greedy and drawn rows alike:

- Greedy rows choose the argmax, so the accepted drafts are the ones that decoding without drafts would have chosen.
- A row that draws accepts draft d with probability p(d), and otherwise yields another token t with probability
  p(t) / (1 - p(d)). That is rejection sampling (Leviathan et al., 2023) for a deterministic draft, q(d) = 1: accept
  with min(1, p/q) = p(d), otherwise draw from max(0, p - q), normalized. The distribution is exactly p.

Row i draws with the same number, from seed and position (lesson 4), as an ordinary step. So a seed gives the same
answer with and without drafts, wherever rows have the same bits in every batch (lesson 9's packed layers). With a
grammar, each row is masked by what the grammar allows after the drafts that the row has seen.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from mini_engine.engine.grammar import Matcher
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SampleRow
from mini_engine.engine.scheduler import Chunk


def num_emitted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many of `chosen`, one token for each of 1 + len(drafts) rows, the answer gains: at least 1.

    A row counts if every draft that it saw equals the token that the previous row chose.
    """
    standing = 1
    for draft, token in zip(drafts, chosen, strict=False):
        if draft != token:
            break
        standing += 1
    return standing


class DraftChunk(Chunk):
    """A chunk of lesson 5 that feeds drafts after its request's newest token: they are the last of its tokens."""

    drafts: Sequence[int] = ()

    def __new__(cls, request: Request, start: int, stop: int, blocks: array, drafts: Sequence[int]) -> "DraftChunk":
        """Return the chunk of a request's tokens from `start` on and the drafts, `stop - start` together."""
        chunk = super().__new__(cls, request, start, stop, blocks)
        chunk.drafts = drafts
        return chunk

    def _replace(self, **changes: Any) -> "DraftChunk":
        """Return the chunk with other fields, its drafts included."""
        return DraftChunk(**{**self._asdict(), "drafts": self.drafts, **changes})

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return the arguments that make it again: for copies."""
        return (*self, self.drafts)

    @property
    def samples(self) -> bool:
        """True if it feeds the request's newest token."""
        return self.stop - len(self.drafts) == len(self.request.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The tokens that it feeds."""
        return [*self.request.token_ids[self.start : self.stop], *self.drafts]

    @property
    def num_samples(self) -> int:
        """One row for the newest token, and one for each draft."""
        return 1 + len(self.drafts) if self.samples else 0


def with_drafts(chunk: Chunk, drafts: Sequence[int]) -> DraftChunk:
    """Return the chunk that feeds `drafts` after its own tokens.

    It starts where `chunk` starts and ends len(drafts) tokens later, in the same blocks. The request does not change:
    drafts are not among its tokens.
    """
    return DraftChunk(chunk.request, chunk.start, chunk.stop + len(drafts), chunk.blocks, drafts)


class MaskAhead(NamedTuple):
    """The tokens that a request's grammar allows after `drafts`. The request's matcher does not advance."""

    matcher: Matcher
    drafts: Sequence[int]

    def mask(self) -> bytes:
        """Return a bit for each token id, as `Matcher.mask` does."""
        return self.matcher.mask_after(self.drafts)


class DraftRow:
    """The SampleRow of the row after `drafts`: they are the newest tokens of its answer."""

    def __init__(self, request: Request, drafts: Sequence[int]) -> None:
        self.params, self.seed, self.stop_ids = request.params, request.seed, request.stop_ids
        self.prompt_ids, self.output_ids = request.prompt_ids, [*request.output_ids, *drafts]
        self.matcher = MaskAhead(request.matcher, drafts)


def sample_rows(request: Request, drafts: Sequence[int]) -> list[SampleRow]:
    """Return the SampleRow of each of the 1 + len(drafts) rows: row i's answer has the first i drafts.

    Row 0 is the request itself, the others are DraftRows with the same seed and prompt. The request does not change.
    """
    return [request, *(DraftRow(request, drafts[:count]) for count in range(1, len(drafts) + 1))]
