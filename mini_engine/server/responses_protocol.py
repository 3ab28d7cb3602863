"""Lesson 7. The supported part of OpenAI's Responses API: text in, text out, and nothing is stored.

A request is a chat under other names, so it is converted to one.
"""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mini_engine.server.chat_protocol import MAX_MESSAGES, MAX_PARTS, ChatRequest, few_pieces
from mini_engine.server.fields import Body, Nothing, between, harmless, in_one_sentence
from mini_engine.server.json_text import JsonObject
from mini_engine.server.protocol import Labelled
from mini_engine.server.structured_outputs import JsonSchema, ResponseFormat

MAX_LABELS = 16
SEND_ALL = "this server does not store responses; send the whole conversation in input"


class TextItem(Body):
    """A part of a message: of the client's (input_text), or of an earlier answer (output_text)."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Nothing = Field([])
    logprobs: Nothing = Field([])


class MessageItem(Body):
    """One turn. Accepted and ignored, since earlier answers have them: id, status, phase."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | Annotated[list[TextItem], Field(fail_fast=True, max_length=MAX_PARTS)],
        in_one_sentence('give a text, or a list of {"type": "input_text", "text": …}'),
    ]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @property
    def as_turn(self) -> JsonObject:
        """Return the turn in a chat's form."""
        texts = [self.content] if isinstance(self.content, str) else [item.text for item in self.content]
        return {"role": self.role, "content": "".join(texts)}


class TextResponseFormat(ResponseFormat):
    """The output form of a chat, requested in `text`."""

    param: ClassVar[str] = "text"


class TextFormat(JsonSchema):
    """The output form: any text, a JSON object, or JSON that fits `schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"

    @property
    def shown(self) -> JsonObject:
        """Return the form as a response repeats it."""
        return self.model_dump(by_alias=True) if self.type == "json_schema" else {"type": self.type}

    @property
    def in_chat(self) -> TextResponseFormat:
        """Return the same form for a chat."""
        schema = {"json_schema": {"schema": self.content}} if "content" in self.model_fields_set else {}
        return TextResponseFormat.model_validate({"type": self.type, **schema})


class TextOptions(Body):
    """Options of the text. `verbosity` is accepted and ignored."""

    format: TextFormat = TextFormat.model_validate({})
    verbosity: str = "medium"


class Reasoning(Body):
    """Reasoning effort and summary. Accepted and ignored: the model decides, and nothing is summarized."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(Body):
    """include_obfuscation: accepted and ignored."""

    include_obfuscation: bool = False


class ResponsesRequest(Labelled):
    """POST /v1/responses: a conversation to answer.

    Accepted and ignored: store (nothing is), metadata, parallel_tool_calls, reasoning.
    Accepted only with a value that changes nothing: the rest from `background` on.
    """

    input: Annotated[
        str | Annotated[list[MessageItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES - 1)],
        in_one_sentence('give a text, or a list of messages such as {"role": "user", "content": …}'),
        few_pieces,
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, between("temperature")] | None = None
    top_p: Annotated[float, between("top_p")] | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    store: bool = False
    metadata: Annotated[
        dict[str, Annotated[str, Field(max_length=512)]], Field(fail_fast=True, max_length=MAX_LABELS)
    ] = Field({})
    reasoning: Reasoning | None = None
    parallel_tool_calls: bool = True
    background: Annotated[Literal[False], harmless] = False
    conversation: Annotated[None, in_one_sentence(SEND_ALL)] = None
    include: Annotated[Nothing, in_one_sentence("this server supports only []; leave it out")] = Field([])
    previous_response_id: Annotated[None, in_one_sentence(SEND_ALL)] = None
    tool_choice: Annotated[Literal["auto", "none"], harmless] = "auto"
    tools: Annotated[Nothing, in_one_sentence("tools are not supported here; use /v1/chat/completions")] = Field([])
    top_logprobs: Annotated[Literal[0], harmless] = 0
    truncation: Annotated[Literal["disabled"], harmless] = "disabled"

    def model_post_init(self, context: Any) -> None:
        """Convert the request to a chat, which takes a while for thousands of messages."""
        _ = self.as_chat

    @cached_property
    def as_chat(self) -> ChatRequest:
        """Return the same request as a chat."""
        turns = [{"role": "system", "content": self.instructions}] if self.instructions else []
        given = self.input
        turns += [{"role": "user", "content": given}] if isinstance(given, str) else [item.as_turn for item in given]
        names = ("model", "temperature", "top_p", "stream", "cache_salt", "session_id")
        same = {name: getattr(self, name) for name in names}
        told = {"messages": turns, "max_tokens": self.max_output_tokens}
        form = (self.text or TextOptions()).format.in_chat
        return ChatRequest.model_validate({**told, "response_format": form, **same})
