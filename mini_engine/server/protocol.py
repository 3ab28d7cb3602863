"""Lesson 7. The bodies of requests, with OpenAI's names, validated strictly.

In addition to OpenAI's names, vLLM's: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos,
return_token_ids, include_stop_str_in_output, structured_outputs.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, PrivateAttr

from mini_engine.engine.grammar import ANYTHING, Grammar
from mini_engine.engine.sampling_params import FRESH_SEED, MAX_LOGPROBS, MAX_SEED, MIN_SEED, SamplingParams
from mini_engine.server.fields import (
    Biases,
    Body,
    Ids,
    SessionId,
    Stop,
    StopIds,
    between,
    harmless,
    in_one_sentence,
    shown,
)
from mini_engine.server.json_text import JsonObject
from mini_engine.server.structured_outputs import Guided

MAX_N = 16
MAX_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16  # of completions, as in OpenAI's API; a chat answer may fill the context
NO_HINT = in_one_sentence("this server supports session_id and cache_salt as hints for its cache; leave this one out")


class Conversation(NamedTuple):
    """A chat's messages, the tools that the model may call, and further variables for the chat template."""

    messages: list[JsonObject]
    tools: list[JsonObject]
    variables: JsonObject


Prompt = str | list[int] | Conversation
OneOrMorePrompts = Annotated[
    str
    | Ids
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    | Annotated[list[Ids], Field(fail_fast=True, max_length=MAX_PROMPTS)],
    in_one_sentence(f"give a text, a list of token ids, or a list of either, at most {MAX_PROMPTS}"),
]


class StreamOptions(Body):
    """include_usage: send one more event at the end, with the usage and no choices.

    continuous_usage_stats: send the usage so far with every event (vLLM's name).
    include_obfuscation: accepted and ignored; it asks for padding that hides how long each piece of text is.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Labelled(Body):
    """The part that all three routes have in common.

    Accepted and ignored, since they do not affect answers: user, safety_identifier, prompt_cache_key, request_id,
    reasoning_effort, verbosity (the model decides).

    cache_salt: share prefixes only with requests of the same salt (lesson 8); the name is vLLM's.
    session_id: the conversation that the request is a turn of, so that its KV is evicted late (lesson 20). Clients of
        another key or salt have sessions of their own; the name is SGLang's.
    Refused, since the cache takes no other hints: priority, retention, kv_retention, session_params.
    """

    model: str | None = None
    stream: bool = False
    cache_salt: str | None = None
    session_id: SessionId | None = None
    priority: Annotated[None, NO_HINT] = None
    retention: Annotated[None, NO_HINT] = None
    kv_retention: Annotated[None, NO_HINT] = None
    session_params: Annotated[None, NO_HINT] = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    service_tier: Annotated[Literal["auto", "default"], harmless] = "auto"


class CloseSession(Body):
    """POST /close_session: a conversation that has no next turn. The names are SGLang's.

    cache_salt: that of the session's requests.
    """

    session_id: SessionId
    cache_salt: str | None = None


class Sampling(Labelled, Guided):
    """The part that completions and chats have in common.

    echo: the prompt is part of the answer, with its logprobs.
    Accepted and ignored: metadata.
    Accepted only with a value that changes nothing: store, service_tier, best_of, skip_special_tokens (vLLM's name).
    """

    temperature: Annotated[float, between("temperature")] = 1.0
    top_p: Annotated[float, between("top_p")] = 1.0
    top_k: Annotated[int, shown(minimum=-1)] = 0
    min_p: Annotated[float, between("min_p")] = 0.0
    repetition_penalty: Annotated[float, between("repetition_penalty")] = 1.0
    presence_penalty: Annotated[float, between("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, between("frequency_penalty")] = 0.0
    seed: Annotated[int, shown(minimum=MIN_SEED, maximum=MAX_SEED)] | None = None
    max_tokens: Annotated[int, shown(minimum=0)] | None = None
    min_tokens: Annotated[int, shown(minimum=0)] = 0
    stop: Stop = Field([])
    stop_token_ids: StopIds = Field([])
    logit_bias: Biases = Field({})
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    echo: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    metadata: JsonObject = Field({})
    store: Annotated[Literal[False], harmless] = False
    best_of: Annotated[Literal[1], harmless] = 1
    skip_special_tokens: Annotated[Literal[True], harmless] = True
    _longest: int | None = PrivateAttr(None)  # a chat answer, as suggested by the checkpoint

    def advised(self, suggested: Mapping[str, Any]) -> Self:
        """Return the same request with the checkpoint's suggestions for parameters that the client left out."""
        left_out = {n: value for n, value in suggested.items() if n in SHARED and n not in self.model_fields_set}
        found = self.model_copy(update=left_out)
        found._longest = suggested.get("max_tokens")
        return found

    def model_post_init(self, context: Any) -> None:
        """Build the prompts where the body is read: for thousands of messages, that takes a while."""
        _ = self.prompts

    @cached_property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts: texts, token ids or conversations."""
        raise NotImplementedError

    @property
    def wanted_logprobs(self) -> int | None:
        """The number of alternatives to report with each token; None for no logprobs."""
        raise NotImplementedError

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.wanted_logprobs if self.echo else None

    @property
    def only_echo(self) -> bool:
        """True to score the prompt and generate nothing. The engine generates one token, which is not shown."""
        return self.echo and self.max_tokens == 0

    def wanted_tokens(self, room: int) -> int:
        """Return the most tokens in the answer, if `room` tokens fit after the prompt."""
        raise NotImplementedError

    def seed_of(self, choice: int) -> int | None:
        """Return the seed of one of the n answers: each gets its own, seed + choice."""
        if self.seed in (None, FRESH_SEED) or choice == 0:
            return self.seed
        return (self.seed + choice) % (MAX_SEED + 1)

    def params_of_all(self, rooms: Sequence[int], grammar: Grammar = ANYTHING) -> list[SamplingParams]:
        """Return the engine's parameters for n answers to each prompt; values that all share are checked once.

        Args:
            rooms: for each prompt, the tokens that fit after it. grammar: `form`, compiled.
        """
        shared = SamplingParams(
            **{name: getattr(self, name) for name in SHARED},
            seed=self.seed,
            max_tokens=self.wanted_tokens(rooms[0]),
            logprobs=self.wanted_logprobs,
            prompt_logprobs=self.wanted_prompt_logprobs,
            logit_bias={int(key): bias for key, bias in self.logit_bias.items()},
            grammar=grammar,
        )
        return [
            shared.of_one(self.seed_of(choice), self.wanted_tokens(room)) for room in rooms for choice in range(self.n)
        ]


SHARED = (  # parameters that the engine has too
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "stop_token_ids", "stop", "include_stop_str_in_output", "ignore_eos"),
)


class CompletionRequest(Sampling):
    """POST /v1/completions: prompts to continue."""

    prompt: OneOrMorePrompts
    logprobs: Annotated[int, shown(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    suffix: Annotated[Literal[""], harmless] = ""

    @cached_property
    def prompts(self) -> Sequence[Prompt]:
        """One or several prompts, each a text or ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [one for one in self.prompt if not isinstance(one, int)]
        return several or [[one for one in self.prompt if isinstance(one, int)]]

    @property
    def wanted_logprobs(self) -> int | None:
        """`logprobs`, which is the number."""
        return self.logprobs

    def wanted_tokens(self, room: int) -> int:
        """`max_tokens`, or 16."""
        if self.only_echo:
            return 1
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
