"""Lesson 7. The part of OpenAI's Responses API that is served here: text in, text out, and nothing is kept.

A request is a chat by other names, so it becomes one.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from mini_engine.server.chat_protocol import MAX_MESSAGES, MAX_PARTS
from mini_engine.server.fields import Body, Flag, JsonObject, Number, Text, Whole, between, in_one_sentence, only
from mini_engine.server.protocol import ChatRequest

SEND_ALL = "this server keeps no responses; send the whole conversation in input"


class TextItem(Body):
    """A part of a message: of the client's (input_text), or of an earlier answer (output_text)."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Annotated[list[Any], Field(max_length=0)] = Field([])
    logprobs: Annotated[list[Any], Field(max_length=0)] = Field([])


class MessageItem(Body):
    """One turn. What earlier answers have beyond that is accepted and ignored: id, status, phase."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Text | Annotated[list[TextItem], Field(fail_fast=True, max_length=MAX_PARTS)],
        in_one_sentence('give a text, or a list of {"type": "input_text", "text": …}'),
    ]
    id: Text | None = None
    status: Text | None = None
    phase: Text | None = None

    @property
    def as_turn(self) -> JsonObject:
        """The turn as a chat has it."""
        texts = [self.content] if isinstance(self.content, str) else [item.text for item in self.content]
        return {"role": self.role, "content": "".join(texts)}


class PlainFormat(Body):
    """The form of the answer: any text."""

    type: Literal["text"] = "text"


class TextOptions(Body):
    """Options of the text. `verbosity`: only the default."""

    format: PlainFormat | None = None
    verbosity: Annotated[Text, only("medium")] = "medium"


class ResponseStreamOptions(Body):
    """include_obfuscation: accepted and ignored."""

    include_obfuscation: Flag = False


class ResponsesRequest(Body):
    """POST /v1/responses: a conversation to answer.

    Accepted and ignored: store (nothing is), metadata, user, safety_identifier, prompt_cache_key, parallel_tool_calls.
    Accepted only with a value that changes nothing: the rest from `background` on.
    """

    input: Annotated[
        Text | Annotated[list[MessageItem], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES - 1)],
        in_one_sentence('give a text, or a list of messages such as {"role": "user", "content": …}'),
    ]
    model: Text | None = None
    instructions: Text | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    temperature: Annotated[Number, between("temperature")] | None = None
    top_p: Annotated[Number, between("top_p")] | None = None
    stream: Flag = False
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    store: Flag = False
    metadata: Annotated[dict[Text, Annotated[Text, Field(max_length=512)]], Field(max_length=16)] = Field({})
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    parallel_tool_calls: Flag = True
    background: Annotated[Flag, only(False)] = False
    conversation: Annotated[Any, only(None, sentence=SEND_ALL)] = None
    include: Annotated[list[Text], only([])] = Field([])
    previous_response_id: Annotated[Any, only(None, sentence=SEND_ALL)] = None
    service_tier: Annotated[Text, only("auto", "default")] = "auto"
    tool_choice: Annotated[Text, only("auto", "none")] = "auto"
    tools: Annotated[list[Any], only([], sentence="tools are not supported here; use /v1/chat/completions")] = Field([])
    top_logprobs: Annotated[Whole, only(0)] = 0
    cache_salt: Text | None = None
    truncation: Annotated[Text, only("disabled")] = "disabled"

    @property
    def as_chat(self) -> ChatRequest:
        """The same request as a chat."""
        turns = [{"role": "system", "content": self.instructions}] if self.instructions else []
        given = self.input
        turns += [{"role": "user", "content": given}] if isinstance(given, str) else [item.as_turn for item in given]
        same = {name: getattr(self, name) for name in ("model", "temperature", "top_p", "stream", "cache_salt")}
        return ChatRequest.model_validate({"messages": turns, "max_tokens": self.max_output_tokens, **same})
