"""Lesson 7. The parts of a chat request: messages, tools, and the output form."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from mini_engine.errors import UserError
from mini_engine.grammars.output_forms import OutputForm
from mini_engine.server.bodies import MAX_VALUES, num_values
from mini_engine.server.fields import Body, Flag, Nothing, Shown, Text, in_one_sentence
from mini_engine.server.json_text import JsonObject
from mini_engine.text.prompts import SILENT

MAX_MESSAGES = 4096
MAX_PARTS = 256
MAX_TOOLS = 128
MAX_PIECES = 4096  # parts and calls of all messages together
Name = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
NAMED = 'give "none", "auto", "required", or {"type": "function", "function": {"name": …}}'


@BeforeValidator
def few_pieces(messages: Any) -> Any:
    """Refuse messages of more than MAX_PIECES parts and calls before any of them is validated."""
    turns = [turn for turn in messages if isinstance(turn, dict)] if isinstance(messages, list) else []
    lists = [value for turn in turns for value in (turn.get("content"), turn.get("tool_calls"))]
    if (count := sum(len(value) for value in lists if isinstance(value, list))) > MAX_PIECES:
        raise PydanticCustomError(
            "too_long", "{count} parts and calls together, more than {most}", {"count": count, "most": MAX_PIECES}
        )
    return messages


class TextPart(Body):
    """A part of a message. Only text parts are supported. `cache_control` is accepted and ignored."""

    type: Literal["text"]
    text: Text
    cache_control: JsonObject = Field({})


class FunctionCall(Body):
    """The function that the assistant called. `arguments`: a JSON string, or an object. Templates see other keys."""

    model_config = ConfigDict(extra="allow")

    name: Name
    arguments: Annotated[Text | JsonObject, in_one_sentence("give an object, or a JSON string")] = ""


class ToolCall(Body):
    """A call in a message of the assistant. The template sees other keys, such as `index`, which streams add."""

    model_config = ConfigDict(extra="allow")

    id: Text = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Shown):
    """One turn of a conversation.

    The checkpoint's template sees all of it, including keys that are not named here. A reasoning model's thoughts
    before its answer are in `reasoning_content` or `reasoning`. Accepted and ignored: cache_control.
    """

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)],
        in_one_sentence('give a text, or a list of {"type": "text", "text": …}'),
    ] = ""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field([])
    tool_call_id: Text | None = None
    name: Text | None = None
    refusal: Text | None = None
    annotations: Nothing = Field([])
    reasoning_content: Text | None = None
    reasoning: Text | None = None
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
    if sum(num_values(each.encode()) for each in given if isinstance(each, str)) > MAX_VALUES:
        raise PydanticCustomError(
            "too_long", "the calls' arguments have more than {most} values together", {"most": MAX_VALUES}
        )
    return messages


Messages = Annotated[
    list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), few_values, few_pieces
]


class Function(Shown):
    """A function that the model may call. `parameters` is always enforced, with or without `strict`."""

    name: Name
    description: Text = ""
    parameters: JsonObject = Field({"type": "object", "properties": {}, "additionalProperties": False})
    strict: Flag = False


class Tool(Shown):
    """A tool: only functions are supported. `cache_control` is accepted and ignored."""

    type: Literal["function"]
    function: Function
    cache_control: JsonObject = Field({})

    @property
    def for_template(self) -> JsonObject:
        """Return the tool as the client describes it."""
        return super().for_template | {"function": self.function.for_template}


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class FunctionName(Body):
    """The function of a tool_choice."""

    name: Name


class NamedTool(Body):
    """A tool_choice that names the one function to call."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool, in_one_sentence(NAMED)]


class JsonSchema(Body):
    """A schema with a name. It is always enforced, with or without `strict`."""

    name: Name = "answer"
    description: Text = ""
    content: JsonObject = Field({"type": "object"}, alias="schema")
    strict: Flag = False


class ResponseFormat(Body):
    """The form of the answer: any text, a JSON object, or JSON that fits a schema.

    schema: with the type json_object, as in llama.cpp and older clients.
    """

    param: ClassVar[str] = "response_format"

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    object_schema: JsonObject = Field({"type": "object"}, alias="schema")

    @property
    def forms(self) -> list[OutputForm]:
        """Return the required output form, or an empty list for any text."""
        if self.type == "text":
            return []
        if self.type == "json_object":
            return [OutputForm(self.object_schema, param=self.param)]
        if self.json_schema is None:
            raise UserError("response_format of type json_schema needs json_schema: {name, schema}", param=self.param)
        return [OutputForm(self.json_schema.content, param=self.param)]
