"""Lesson 7. The body of a chat request: messages, tools, and the parameters that only chats have."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from mini_engine.base.errors import UserError
from mini_engine.engine.sampling_params import MAX_LOGPROBS
from mini_engine.grammars.output_forms import OutputForm
from mini_engine.server.fields import Body, Name, Nothing, Shown, harmless, in_one_sentence, too_many
from mini_engine.server.json_text import MAX_VALUES, JsonObject, num_values
from mini_engine.server.protocol import Conversation, Prompt, Sampling
from mini_engine.text.prompts import SILENT

MAX_MESSAGES = 4096
MAX_PARTS = 256
MAX_TOOLS = 128
MAX_PIECES = 4096  # parts and calls of all messages together
TEXT_ALONE = "this server supports only ['text']; leave it out"
NAMED = 'give "none", "auto", "required", or {"type": "function", "function": {"name": …}}'


@BeforeValidator
def few_pieces(messages: Any) -> Any:
    """Refuse messages of more than MAX_PIECES parts and calls before any of them is validated."""
    turns = [turn for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else []
    lists = [value for turn in turns for value in (turn.get("content"), turn.get("tool_calls"))]
    if (count := sum(len(value) for value in lists if isinstance(value, list))) > MAX_PIECES:
        raise too_many(count, "parts and calls together", MAX_PIECES)
    return messages


class TextPart(Body):
    """A part of a message. Only text parts are supported. `cache_control` is accepted and ignored."""

    type: Literal["text"]
    text: str
    cache_control: JsonObject = Field({})


class FunctionCall(Body, extra="allow"):
    """The function that the assistant called. `arguments`: a JSON string, or an object. Templates see other keys."""

    name: Name
    arguments: Annotated[str | JsonObject, in_one_sentence("give an object, or a JSON string")] = ""


class ToolCall(Body, extra="allow"):
    """A call in a message of the assistant. The template sees other keys, such as `index`, which streams add."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Shown, extra="allow"):
    """One turn of a conversation.

    The checkpoint's template sees all of it, including keys that are not named here. A reasoning model's thoughts
    before its answer are in `reasoning_content` or `reasoning`. Accepted and ignored: cache_control.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)],
        in_one_sentence('give a text, or a list of {"type": "text", "text": …}'),
    ] = ""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field([])
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Nothing = Field([])
    reasoning_content: str | None = None
    reasoning: str | None = None
    cache_control: JsonObject = Field({})

    @model_validator(mode="after")
    def check_content(self) -> "Message":
        """Require content in every message except the assistant's and a tool's."""
        if "content" not in self.model_fields_set and self.role not in SILENT:
            raise PydanticCustomError("content", "give content; only assistant and tool messages may leave it out")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "only the assistant's messages can have tool_calls")
        return self


@AfterValidator
def few_values(messages: list[Message]) -> list[Message]:
    """Refuse calls whose arguments, as JSON strings, hold more values together than a body may: they will be parsed."""
    given = [call.function.arguments for message in messages for call in message.tool_calls]
    if (count := sum(num_values(each.encode()) for each in given if isinstance(each, str))) > MAX_VALUES:
        raise too_many(count, "values in the calls' arguments together", MAX_VALUES)
    return messages


class Function(Shown):
    """A function that the model may call. `parameters` is always enforced, with or without `strict`."""

    name: Name
    description: str = ""
    parameters: JsonObject = Field({"type": "object", "properties": {}, "additionalProperties": False})
    strict: bool = False


class Tool(Shown):
    """A tool: only functions are supported. `cache_control` is accepted and ignored."""

    type: Literal["function"]
    function: Function
    cache_control: JsonObject = Field({})

    @property
    def for_template(self) -> JsonObject:
        """Return the tool as the client describes it."""
        return super().for_template | {"function": self.function.for_template}


class FunctionName(Body):
    """The function of a tool_choice."""

    name: Name


class NamedTool(Body):
    """A tool_choice that names the one function to call."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool, in_one_sentence(NAMED)]


class ChatRequest(Sampling):
    """POST /v1/chat/completions: a conversation to answer.

    chat_template_kwargs: more variables for the template, such as enable_thinking; the name is vLLM's.
    Accepted only with a value that changes nothing: modalities, and vLLM's echo.
    """

    messages: Annotated[
        list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), few_values, few_pieces
    ]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field([])
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    modalities: Annotated[
        list[Literal["text"]], Field(fail_fast=True, min_length=1, max_length=1), in_one_sentence(TEXT_ALONE)
    ] = Field(["text"])
    echo: Annotated[Literal[False], harmless] = False
    chat_template_kwargs: JsonObject = Field({})

    @cached_property
    def prompts(self) -> Sequence[Prompt]:
        """The one conversation. Tools that must not be called are not described."""
        tools = [] if self.tool_choice == "none" else [tool.for_template for tool in self.tools]
        messages = [message.for_template for message in self.messages]
        return [Conversation(messages, tools, self.chat_template_kwargs)]

    @property
    def form(self) -> OutputForm | None:
        """Return the output form that response_format or similar parameters, tools and tool_choice ask for."""
        said = super().form
        functions = {tool.function.name: tool.function.parameters for tool in self.tools}
        if len(functions) < len(self.tools):
            raise UserError("two tools have the same name; give each its own", param="tools")
        choice = "none" if self.tool_choice in ("auto", None) and not functions else self.tool_choice or "auto"
        if not isinstance(choice, str):
            if choice.function.name not in functions:
                raise UserError(
                    f"tool_choice names {choice.function.name!r}, which is not in tools", param="tool_choice"
                )
            functions = {choice.function.name: functions[choice.function.name]}
        if choice != "none" and not functions:
            raise UserError("tool_choice is given without tools; give both", param="tool_choice")
        if choice == "none":
            return said
        several = self.parallel_tool_calls and isinstance(choice, str)
        return replace(said or OutputForm(), functions=functions, may_say=choice == "auto", several=several)

    @property
    def wanted_logprobs(self) -> int | None:
        """`top_logprobs`, if `logprobs` is true."""
        if self.top_logprobs and not self.logprobs:
            raise UserError("top_logprobs is given without logprobs: true; give both", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def wanted_tokens(self, room: int) -> int:
        """Return `max_completion_tokens`, or `max_tokens`, its older name, or the suggested number, or `room`."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise UserError("max_tokens and max_completion_tokens mean the same; give one of them", param="max_tokens")
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return max(1, min(room, self._longest or room)) if given is None else given
