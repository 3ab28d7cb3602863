"""Lesson 4. The parameters of one request: how its tokens are chosen and when its answer ends.

Values are checked once, on construction, so a running batch never meets an invalid one.
"""

import copy
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mini_engine.base.errors import UserError
from mini_engine.base.values import check_switch, checked_real, checked_whole, shown
from mini_engine.engine.grammar import ANYTHING, Grammar, TokenMask

GREEDY = 0.0
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
FRESH_SEED = -1  # vLLM's and llama.cpp's clients send this for "no seed"
LOWEST_TEMPERATURE = 1e-6  # below it a logit divided by it may overflow float32
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_STOP = 1024  # characters: searching for a stop string takes time from every answer in the batch


class Range(NamedTuple):
    """The values a parameter may take, both ends included, and a note on its special value."""

    least: float
    most: float
    note: str


NUMBERS = {
    "temperature": Range(0.0, 100.0, "0 is greedy"),
    "top_p": Range(0.0, 1.0, "1 keeps every token"),
    "min_p": Range(0.0, 1.0, "0 keeps every token"),
    "repetition_penalty": Range(0.01, 100.0, "1 changes nothing"),
    "presence_penalty": Range(-2.0, 2.0, "0 changes nothing"),
    "frequency_penalty": Range(-2.0, 2.0, "0 changes nothing"),
}


@dataclass(frozen=True)
class SamplingParams:
    """Decides how a request's tokens are chosen and when its answer ends. Names and defaults are vLLM's and OpenAI's.

    temperature: logits are divided by it; 0 is greedy, and so is anything below 1e-6.
    top_k: keep only the k best tokens; 0 and -1 are off, and so is anything above the size of the vocabulary.
    top_p: keep only the smallest set of best tokens whose probabilities reach top_p; 1 is off, 0 keeps the best one.
    min_p: keep only tokens at least min_p times as likely as the best one; 0 is off.
    repetition_penalty: divides positive logits of tokens in the prompt or the answer, multiplies negative ones.
    presence_penalty: subtracted from the logit of every token in the answer.
    frequency_penalty: subtracted from a token's logit once for each time it occurs in the answer.
    seed: determines the draws; None, or -1, takes a fresh one for each request. Requests with equal seeds draw alike.
    max_tokens: the longest answer. min_tokens: no stop id is chosen until the answer has this many tokens, unless a
        grammar allows nothing else.
    stop_token_ids: each of them ends the answer, as the model's end tokens do unless `ignore_eos` is set. With a
        grammar, they end it only once the grammar is complete.
    stop: a string or several, of at most 1024 characters each; the first to appear ends the answer and is not shown
        (lesson 6), unless `include_stop_str_in_output` is set.
    logprobs: report this many of the best tokens in addition to the chosen one; 0 is the chosen one alone, None is off.
    prompt_logprobs: the same for each token of the prompt but the first; nothing is taken from the prefix cache then.
    logit_bias: token id to a number from -100 to 100, added to the token's logit before anything else.
    grammar: the format of the answer; tokens that do not fit are never chosen, and its end ends the answer
        (lesson 7).

    Raises:
        UserError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: Collection[int] = ()
    stop: Collection[str] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    grammar: Grammar = ANYTHING

    def __post_init__(self) -> None:
        self._set("stop_token_ids", _token_ids(self.stop_token_ids))
        self._set("stop", _stop_texts(self.stop))
        for name, allowed in NUMBERS.items():
            self._set(name, checked_real(name, getattr(self, name), *allowed))
        if self.temperature < LOWEST_TEMPERATURE:
            self._set("temperature", GREEDY)
        self._set("top_k", max(0, checked_whole("top_k", self.top_k, -1, None, "0 and -1 keep every token")))
        self._set_own(self.seed, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                self._set(name, checked_whole(name, value, 0, MAX_LOGPROBS, "leave it out for none"))
        self._set("logit_bias", _biases(self.logit_bias))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            check_switch(name, getattr(self, name))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the only way to set a frozen field

    def _set_own(self, seed: object, max_tokens: object) -> None:
        self._set("max_tokens", checked_whole("max_tokens", max_tokens, 1, None, "an answer has at least one token"))
        self._set("min_tokens", checked_whole("min_tokens", self.min_tokens, 0, self.max_tokens, "at most max_tokens"))
        self._set("seed", _seed(seed))

    def of_one(self, seed: int | None, max_tokens: int) -> "SamplingParams":
        """Return the parameters of one of several answers. Checks only these two values: the others have been."""
        found = copy.copy(self)
        found._set_own(seed, max_tokens)
        return found

    @property
    def is_greedy(self) -> bool:
        """True if the best token is always taken: nothing is drawn, and filters make no difference."""
        return self.temperature == GREEDY

    def request_seed(self) -> int:
        """Return the seed for one request: the given one, or a fresh one from the operating system."""
        return secrets.randbits(64) if self.seed is None else self.seed

    def stop_ids(self, eos_token_ids: Collection[int] = ()) -> frozenset[int]:
        """Return the tokens that end an answer, for a model with these end tokens."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_token_ids)

    def check_fits(self, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        """Raise UserError if a model with this vocabulary cannot honour the parameters. Call before admission."""
        stop_ids = self.stop_ids(eos_token_ids)
        stray = next((token for token in sorted(stop_ids) if token >= vocab_size), None)
        if stray is not None:
            raise UserError(
                f"stop token id {stray} is not in the vocabulary; ids run from 0 to {vocab_size - 1}",
                param="stop_token_ids",
            )
        if self.logit_bias and max(self.logit_bias) >= vocab_size:
            raise UserError(
                f"logit_bias names token {max(self.logit_bias)}, which is not in the vocabulary; ids run from 0 to "
                f"{vocab_size - 1}",
                param="logit_bias",
            )
        if self.min_tokens and len(stop_ids) == vocab_size:
            raise UserError(
                f"min_tokens is {self.min_tokens}, but all {vocab_size} tokens end the answer; use fewer stop ids",
                param="min_tokens",
            )

    def finish_reason(self, output_ids: Sequence[int], stop_ids: Collection[int]) -> str | None:
        """Return the reason an answer is over: "stop" for a stop id, "length" for max_tokens; None if it goes on."""
        if output_ids and output_ids[-1] in stop_ids:
            return "stop"
        return "length" if len(output_ids) >= self.max_tokens else None


class SampleRow(Protocol):
    """The part of a request that the sampler reads, one for each row of logits.

    prompt_ids, output_ids: the tokens so far; the row's logits are about the next one.
    stop_ids: the tokens that end the answer, `params.stop_ids(...)`.
    seed: determines the draws, together with the position; `params.seed`, or a fresh one that stays the same.
    matcher: which tokens `params.grammar` allows next.
    """

    @property
    def params(self) -> SamplingParams: ...
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def output_ids(self) -> Sequence[int]: ...
    @property
    def stop_ids(self) -> Collection[int]: ...
    @property
    def seed(self) -> int: ...
    @property
    def matcher(self) -> TokenMask: ...


def _seed(value: object) -> int | None:
    """Return a seed as 64 unsigned bits, a negative one as its two's complement; None for a fresh one."""
    if value is None:
        return None
    seed = checked_whole("seed", value, MIN_SEED, MAX_SEED, "leave it out for a fresh one")
    return None if seed == FRESH_SEED else seed % (MAX_SEED + 1)


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Collection):
        raise UserError(f"stop_token_ids is {shown(value)}; give a list of token ids", param="stop_token_ids")
    return tuple(
        checked_whole("a stop token id", token, 0, None, "an id from the tokenizer", param="stop_token_ids")
        for token in value
    )


def _biases(value: object) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise UserError(f"logit_bias is {shown(value)}; give a dict from token id to number", param="logit_bias")
    biases = {}
    for key, bias in value.items():
        token = checked_whole("a token id in logit_bias", key, 0, None, "an id from the tokenizer", param="logit_bias")
        name = f"logit_bias of token {token}"
        biases[token] = checked_real(name, bias, -MAX_BIAS, MAX_BIAS, param="logit_bias")
    return biases


def _stop_texts(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    several = (value,) if isinstance(value, str) else value
    if not isinstance(several, Collection) or not all(isinstance(text, str) for text in several):
        raise UserError(f"stop is {shown(value)}; give a string or a list of strings", param="stop")
    if (longest := max(map(len, several), default=0)) > MAX_STOP:
        raise UserError(
            f"a stop string has {longest} characters, more than {MAX_STOP}; its beginning may be enough", param="stop"
        )
    return tuple(several)
