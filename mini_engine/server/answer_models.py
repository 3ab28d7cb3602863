"""Lesson 7. The shapes of whole answers, as /openapi.json describes them; `reply` and `responses` build them."""

from typing import Any, Literal

from pydantic import BaseModel


class Shape(BaseModel, extra="forbid"):
    """A JSON object with these keys and no others. A key with a default may be missing."""


class ErrorContent(Shape):
    """message: one sentence. param: the parameter at fault. code: a word for programs."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class Closed(Shape):
    """closed: True if there was such a session."""

    closed: bool


class Error(Shape):
    """Any refusal, in OpenAI's shape."""

    error: ErrorContent


class CachedTokens(Shape):
    """Tokens of the prompts that were in the prefix cache."""

    cached_tokens: int


class Usage(Shape):
    """The token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(Shape):
    """Four lists with an entry for each token; an echoed prompt's first token has no logprobs."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatToken(Shape):
    """One token of a chat's logprobs."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(ChatToken):
    """The token that was chosen, and the best ones."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(Shape):
    """An entry for each token."""

    content: list[ChosenToken]


class CompletionChoice(Shape):
    """One continuation. `token_ids` comes with return_token_ids."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None


class CalledFunction(Shape):
    """`arguments` is a JSON string."""

    name: str
    arguments: str


class Call(Shape):
    """A call by the model."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Shape):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[Call] | None = None


class ChatChoice(Shape):
    """One answer. `token_ids` comes with return_token_ids."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class AnswerShape(Shape):
    """The part that completions and chats have in common."""

    id: str
    created: int
    model: str
    usage: Usage


class Completion(AnswerShape):
    """The answer to /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Chat(AnswerShape):
    """The answer to /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class OutputText(Shape):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Shape):
    """The one output of a response."""

    id: str
    type: Literal["message"]
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ResponseAnswer(BaseModel):
    """The answer to /v1/responses, which also repeats the request's parameters."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    output: list[OutputMessage]
    usage: dict[str, Any]


class ModelCard(Shape):
    """A model. max_model_len: positions, vLLM's name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Shape):
    """The models served here."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """status: "ok", or the problem."""

    status: str
