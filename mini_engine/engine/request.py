"""Lesson 5. A request: its tokens, the number of them with KV, and its parameters. Everything else is derived."""

import logging
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from mini_engine.engine.grammar import Broken, Matcher
from mini_engine.engine.sampled import Sampled, TokenLogprobs
from mini_engine.engine.sampling_params import SamplingParams

log = logging.getLogger(__name__)


class FinishReason(StrEnum):
    """The reason a request ended. `stop`: a stop token or stop string; `length`: the answer has max_tokens tokens.

    `grammar`: the request's grammar cannot go on, or its parameters leave no token to choose; not the engine's fault.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    GRAMMAR = "grammar"


class Ending(NamedTuple):
    """The reason an answer is over, None while it goes on; and, after an error, one sentence."""

    reason: FinishReason | None = None
    error: str | None = None


@dataclass(eq=False)
class Request:
    """One prompt and its answer so far. The sampler reads it as one row of the batch.

    priority: with the scheduler's policy "priority", smaller numbers go first.
    stop_ids: the tokens that end the answer, `params.stop_ids(...)`.
    namespace: only requests of the same namespace may share KV.
    session: the conversation that it is a turn of, if the client says so: a hint for what to evict.
    token_ids: the prompt followed by the answer so far, `output_ids`; only `append` and `keep` change either.
    matcher: the state of the answer in `params.grammar`.
    prompt_logprobs: those of the prompt's tokens from the second on, as far as computed, if `params` asks for them.
    arrival: its position in the order of arrival, assigned by the scheduler.
    arrived_at: how many tokens the scheduler had handed out when it arrived.
    num_overtaken: tokens of later prompts that have gone before it since.
    num_computed_tokens: leading tokens whose KV is written. A preemption resets it to 0.
    num_cached_tokens: leading tokens that had KV already when it was first admitted.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    stop_ids: Collection[int] = ()
    namespace: Hashable = None
    session: Hashable = None
    token_ids: list[int] = field(init=False)
    output_ids: list[int] = field(init=False, default_factory=list)
    logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    matcher: Matcher = field(init=False)
    seed: int = field(init=False)
    arrival: int = field(init=False, default=0)
    arrived_at: int = field(init=False, default=0)
    num_overtaken: int = field(init=False, default=0)
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    finish_reason: FinishReason | None = field(init=False, default=None)
    error: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.seed = self.params.request_seed()
        self.matcher = self.params.grammar.matcher()

    def append(self, sampled: Sampled) -> None:
        """Append the next token of the answer. If the grammar fails at it, the answer ends with an error."""
        self.token_ids.append(sampled.token_id)
        self.output_ids.append(sampled.token_id)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
        try:
            self.matcher.push(sampled.token_id)
        except Exception as error:
            log.exception("the grammar of request %s failed", self.id)
            self.matcher = Broken(f"the grammar failed: {type(error).__name__}: {error}")

    def reason_to_end(self) -> FinishReason | None:
        """Return the reason if the newest token ends the answer, otherwise None.

        A stop id is an ordinary token as long as the grammar is not complete.
        """
        reason = self.params.finish_reason(self.output_ids, self.stop_ids)
        if reason == FinishReason.STOP and not (self.matcher.is_over or self.matcher.may_end):
            reason = self.params.finish_reason(self.output_ids, ())
        return None if reason is None else FinishReason(reason)

    def keep(self, num_output_ids: int) -> None:
        """Keep only the answer's first `num_output_ids` tokens: a stop string ended it there.

        There are more only if the answer gained several tokens before its text was read.
        """
        dropped = len(self.output_ids) - num_output_ids
        if dropped <= 0:
            return
        del self.token_ids[-dropped:], self.output_ids[-dropped:], self.logprobs[num_output_ids:]
        self.num_computed_tokens = min(self.num_computed_tokens, len(self.token_ids) - 1)

    def ending(self, stopped: bool) -> Ending:
        """Return why the answer is over. What ends it with a token takes precedence over reaching max_tokens.

        Args:
            stopped: a stop string has ended its text, which the engine does not see.
        """
        if self.matcher.error is not None:
            return Ending(FinishReason.GRAMMAR, self.matcher.error)
        if stopped or self.matcher.is_over:
            return Ending(FinishReason.STOP)
        return Ending(self.finish_reason, self.error)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens without KV: all at first, one while decoding, all again after a preemption."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True if log probabilities of its prompt are asked for and not all computed."""
        asked = self.params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < len(self.prompt_ids) - 1

    @property
    def is_prefilling(self) -> bool:
        """True if more tokens need KV than the one sampled last."""
        return self.num_computed_tokens < max(len(self.prompt_ids), len(self.token_ids) - 1)

    @property
    def has_caught_up(self) -> bool:
        """True if it has as much KV as when it was last preempted, or was never preempted.

        If a request could be preempted again before that, it might never make progress.
        """
        return self.num_preemptions == 0 or not self.is_prefilling

    @property
    def max_kv_tokens(self) -> int:
        """The most tokens that can need KV: the last token of the longest answer is sampled but never fed."""
        return len(self.prompt_ids) + self.params.max_tokens - 1

    @property
    def computed_ids(self) -> list[int]:
        """A copy of the tokens whose KV is written."""
        return self.token_ids[: self.num_computed_tokens]

    @property
    def is_finished(self) -> bool:
        """True if it has ended, for any reason."""
        return self.finish_reason is not None
