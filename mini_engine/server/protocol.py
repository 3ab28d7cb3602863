"""Lesson 7. What a client may ask for: OpenAI's names, checked strictly.

A number is a number ("5" and true are not), null means left out, and an unknown name is an error: see `errors.refusal`.
In addition to OpenAI's names, vLLM's: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos,
return_token_ids.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mini_engine.engine.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from mini_engine.errors import UserError

MAX_N = 16
MAX_STOPS = 16
HALF = "half_a_character"
DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI's; a chat answer may fill the context


def in_one_sentence(sentence: str) -> WrapValidator:
    """Report `sentence` if none of a union's alternatives fits, instead of one error for each alternative."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if any(one["type"] == HALF for one in error.errors()):
                raise half_a_character() from None
            raise PydanticCustomError("union", "{sentence}", {"sentence": sentence}) from None

    return WrapValidator(check)


def half_a_character() -> PydanticCustomError:
    """JSON can spell half of a character beyond U+FFFF, as in "\\ud83d"; no text contains such a thing."""
    return PydanticCustomError(HALF, "a text holds half a character, a lone surrogate")


def of_whole_characters(text: str) -> str:
    """The text, if it can be written as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise half_a_character() from None
    return text


Whole = Annotated[int, Strict()]
Number = Annotated[float, Strict()]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), AfterValidator(of_whole_characters)]
Ids = list[Whole]
Stop = Annotated[
    Text | Annotated[list[Text], Field(max_length=MAX_STOPS)],
    in_one_sentence(f"give a text, or a list of at most {MAX_STOPS} texts"),
]
Conversation = list[dict[str, str]]
Prompt = str | list[int] | Conversation
OneOrMorePrompts = Annotated[
    Text | Ids | list[Text] | list[Ids],
    in_one_sentence("give a text, a list of token ids, or a list of either"),
]


class Body(BaseModel):
    """A JSON object in which null means left out and an unknown name is an error."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def leave_out_nulls(cls, data: Any) -> Any:
        """Drop the keys whose value is null."""
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Body):
    """include_usage: send one more event at the end, with the usage and no choices."""

    include_usage: Flag = False


class Sampling(Body):
    """What completions and chats have in common. `user` is accepted and ignored.

    cache_salt: share prefixes only with requests of the same salt (lesson 8); the name is vLLM's.
    """

    model: Text | None = None
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Whole = 0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    seed: Whole | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole = 0
    stop: Stop = []
    stop_token_ids: Ids = []
    ignore_eos: Flag = False
    n: Annotated[Whole, Field(ge=1, le=MAX_N)] = 1
    stream: Flag = False
    stream_options: StreamOptions | None = None
    return_token_ids: Flag = False
    user: Text | None = None
    cache_salt: Text | None = None

    @property
    def prompts(self) -> Sequence[Prompt]:
        """What to answer: texts, token ids or conversations."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """The client wants a final event with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives to report with each token; None for no logprobs."""
        raise NotImplementedError

    def wanted_tokens(self, room: int) -> int:
        """The longest answer, given that `room` tokens fit behind the prompt."""
        raise NotImplementedError

    def params(self, choice: int, room: int) -> SamplingParams:
        """The engine's parameters for one of the n answers. With a seed, each choice gets its own: seed + choice."""
        shared = {name: getattr(self, name) for name in SHARED}
        seed = None if self.seed is None else self.seed + choice if self.seed <= MAX_SEED - MAX_N else self.seed
        return SamplingParams(**shared, seed=seed, max_tokens=self.wanted_tokens(room), logprobs=self.wanted_logprobs)


SHARED = (  # names that the engine has too
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "stop_token_ids",
    "stop",
    "ignore_eos",
)


class CompletionRequest(Sampling):
    """POST /v1/completions: prompts to continue."""

    prompt: OneOrMorePrompts
    logprobs: Whole | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One or several, each a text or ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [one for one in self.prompt if not isinstance(one, int)]
        return several or [[one for one in self.prompt if isinstance(one, int)]]

    @property
    def wanted_logprobs(self) -> int | None:
        """`logprobs` is the number."""
        return self.logprobs

    def wanted_tokens(self, room: int) -> int:
        """`max_tokens`, or 16."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class TextPart(Body):
    """A part of a message. Only text parts are supported."""

    type: Literal["text"]
    text: Text


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[Text | list[TextPart], in_one_sentence('give a text, or a list of {"type": "text", "text": …}')]

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Sampling):
    """POST /v1/chat/completions: a conversation to answer."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Whole | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> Sequence[Conversation]:
        """The one conversation."""
        return [[{"role": message.role, "content": message.text} for message in self.messages]]

    @property
    def wanted_logprobs(self) -> int | None:
        """`logprobs` says whether, `top_logprobs` how many."""
        if self.top_logprobs is not None and not self.logprobs:
            raise UserError("top_logprobs is given without logprobs: true; give both", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def wanted_tokens(self, room: int) -> int:
        """`max_completion_tokens`, `max_tokens` as it used to be called, or whatever fits."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise UserError(
                "max_tokens and max_completion_tokens are two names for the same thing; give one of them",
                param="max_tokens",
            )
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return max(1, room) if given is None else given
