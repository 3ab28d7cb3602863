"""Lesson 14. Verification: the model computes the logits behind every guess in one step, and decides how many stand.

A request feeds its newest token and k drafts in one chunk of 1 + k rows. Row i sees the first i drafts, so its logits
are those of an ordinary step in which the answer had gone that way. The sampler chooses a token from each row:

    fed     x    d1   d2   d3          x: the newest token; d1 … d3: the drafts
    chosen  c0   c1   c2   c3          c0 is right whatever the drafts are; c1 only if d1 = c0, and so on

The tokens up to the first wrong draft are the answer's next tokens, and the one chosen in its place is another: a step
yields 1 to k + 1 tokens. This holds for greedy and drawn rows alike:

- Greedy rows choose the argmax, so the accepted drafts are the ones that decoding without drafts would have chosen.
- A row that draws accepts draft d with probability p(d), and otherwise yields another token t with probability
  p(t) / (1 - p(d)). That is rejection sampling (Leviathan et al., 2023) for a draft that is certain of itself,
  q(d) = 1: accept with min(1, p/q) = p(d), otherwise draw from max(0, p - q), scaled. The distribution is exactly p.

Row i draws with the number of seed and position (lesson 4) that an ordinary step would use. A seed therefore gives the
same answer with and without drafts, wherever rows have the same bits in every batch (lesson 9's packed layers).
With a grammar, each row is masked with what the grammar allows behind the drafts that the row has seen.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from mini_engine.engine.grammar import Matcher
from mini_engine.engine.request import Request
from mini_engine.engine.sampling_params import SampleRow
from mini_engine.engine.scheduler import Chunk


def num_emitted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Return how many tokens of `chosen`, one for each of 1 + len(drafts) rows, the answer gains: at least 1.

    A row stands if every draft that it saw is what the row before it chose.
    """
    standing = 1
    for draft, token in zip(drafts, chosen, strict=False):
        if draft != token:
            break
        standing += 1
    return standing


class DraftChunk(Chunk):
    """A chunk of lesson 5 that feeds drafts behind its request's newest token: they are the last of its tokens."""

    drafts: Sequence[int] = ()

    def __new__(cls, request: Request, start: int, stop: int, blocks: array, drafts: Sequence[int]) -> "DraftChunk":
        """Return the chunk of a request's tokens from `start` on and the drafts, `stop - start` together."""
        chunk = super().__new__(cls, request, start, stop, blocks)
        chunk.drafts = drafts
        return chunk

    @property
    def samples(self) -> bool:
        """Whether it feeds the request's newest token."""
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
    """Return the chunk that feeds `drafts` behind its own tokens.

    It starts where `chunk` starts and ends len(drafts) tokens later, in the same blocks. The request stays as it is: a
    draft is no token of it.
    """
    return DraftChunk(chunk.request, chunk.start, chunk.stop + len(drafts), chunk.blocks, drafts)


class MaskAhead(NamedTuple):
    """Which tokens a request's grammar allows behind `drafts`. The request's matcher stays where it is."""

    matcher: Matcher
    drafts: Sequence[int]

    def mask(self) -> bytes:
        """Return a bit for each token id, as `Matcher.mask` does."""
        return self.matcher.mask_after(self.drafts)


class DraftRow:
    """What the sampler reads of the row behind `drafts`: a SampleRow in whose answer they are the newest tokens."""

    def __init__(self, request: Request, drafts: Sequence[int]) -> None:
        self.params, self.seed, self.stop_ids = request.params, request.seed, request.stop_ids
        self.prompt_ids, self.output_ids = request.prompt_ids, [*request.output_ids, *drafts]
        self.matcher = MaskAhead(request.matcher, drafts)


def sample_rows(request: Request, drafts: Sequence[int]) -> list[SampleRow]:
    """Return what the sampler reads of each of the 1 + len(drafts) rows: row i's answer has the first i drafts.

    Row 0 is the request itself, the others are DraftRows: same seed, same prompt. The request stays as it is.
    """
    return [request, *(DraftRow(request, drafts[:count]) for count in range(1, len(drafts) + 1))]
