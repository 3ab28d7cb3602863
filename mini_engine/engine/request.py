"""Lesson 5. A request is its tokens, how many of them have their KV, and what was asked for. The rest follows."""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from enum import StrEnum

from mini_engine.engine.sampled import Sampled, TokenLogprobs
from mini_engine.engine.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended. `stop`: a stop token or text; `length`: it has all the tokens that were asked for."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer. The sampler reads it as a row of its own.

    priority: with the scheduler's policy "priority", smaller numbers go first.
    stop_ids: the tokens that end the answer, `params.stop_ids(...)`.
    namespace: with whom it shares what it computes: requests of the same namespace (lesson 8).
    token_ids: the prompt and behind it the answer so far, `output_ids`; only `append` adds to them.
    arrival: its place among all requests that ever came; the scheduler numbers them.
    num_computed_tokens: leading tokens whose KV is written. A preemption sets it back to 0.
    num_cached_tokens: leading tokens that were there already when it was first admitted (lesson 8).
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    stop_ids: Collection[int] = ()
    namespace: Hashable = None
    token_ids: list[int] = field(init=False)
    output_ids: list[int] = field(init=False, default_factory=list)
    logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    seed: int = field(init=False)
    arrival: int = field(init=False, default=0)
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    finish_reason: FinishReason | None = field(init=False, default=None)
    error: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.seed = self.params.request_seed()

    def append(self, sampled: Sampled) -> None:
        """Take the next token of the answer."""
        self.token_ids.append(sampled.token_id)
        self.output_ids.append(sampled.token_id)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is missing: all at first, one while it decodes, all again after a preemption."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """It has more to compute than the token it chose last."""
        return self.num_computed_tokens < max(len(self.prompt_ids), len(self.token_ids) - 1)

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV it may ever need: the last token of an answer is chosen and never fed."""
        return len(self.prompt_ids) + self.params.max_tokens - 1

    @property
    def computed_ids(self) -> list[int]:
        """A copy of the tokens whose KV is written."""
        return self.token_ids[: self.num_computed_tokens]

    @property
    def is_finished(self) -> bool:
        """It has ended, for whatever reason."""
        return self.finish_reason is not None
