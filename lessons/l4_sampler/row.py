"""Lesson 4. A row for the sampler without a request, for what tries or times the sampler alone."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from mini_engine.engine.grammar import Matcher
from mini_engine.engine.sampling_params import SamplingParams


@dataclass
class Row:
    """A SampleRow on its own, for scripts and tests that have no request."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int] = ()
    stop_ids: Collection[int] = ()
    seed: int = field(init=False)
    matcher: Matcher = field(init=False)

    def __post_init__(self) -> None:
        self.seed = self.params.request_seed()
        self.matcher = self.params.grammar.matcher()
