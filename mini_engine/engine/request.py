"""Lesson 5. A request is its tokens, how many of them have their KV, and what was asked for. The rest follows."""

from dataclasses import dataclass
from enum import StrEnum

from mini_engine.engine.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended. `stop`: a stop token or text; `length`: it has all the tokens that were asked for."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False)
class Request:
    """One prompt on its way to an answer.

    token_ids: the prompt, and behind it the answer so far.
    num_prompt_tokens: where the answer begins in token_ids.
    num_computed_tokens: leading tokens whose KV is written. A preemption sets it back to 0.
    priority: with the scheduler's policy "priority", smaller numbers go first.
    arrival: its place among all requests that ever came; the scheduler numbers them.
    num_cached_tokens: leading tokens that were there already when it was first admitted (lesson 8).
    """

    id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    priority: int = 0
    arrival: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """The answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is missing: all at first, one while it decodes, all again after a preemption."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """It has more to compute than the one token that it chose last."""
        return self.num_computed_tokens < max(self.num_prompt_tokens, len(self.token_ids) - 1)

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV it may ever need: the last token of an answer is chosen and never fed."""
        return self.num_prompt_tokens + self.params.max_tokens - 1

    @property
    def prompt_ids(self) -> list[int]:
        """A copy of the prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_ids(self) -> list[int]:
        """A copy of the answer so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def computed_ids(self) -> list[int]:
        """A copy of the tokens whose KV is written."""
        return self.token_ids[: self.num_computed_tokens]

    @property
    def is_finished(self) -> bool:
        """It has ended, for whatever reason."""
        return self.finish_reason is not None
