"""Lesson 7. Parameters that ask for an output form: OpenAI's response_format, and vLLM's names."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError, from_json

from mini_engine.base.errors import UserError
from mini_engine.grammars.output_forms import OutputForm
from mini_engine.grammars.schemas import MAX_CHARACTERS
from mini_engine.server.fields import Body, Name, in_one_sentence, too_many
from mini_engine.server.json_text import JsonObject

MAX_CHOICES = 1024
MAX_WRITTEN = 4 * MAX_CHARACTERS  # characters of a schema that comes as a string, which may be indented
UNKNOWN = "this server does not support client grammars; use json, regex or choice"


def from_text(schema: Any) -> Any:
    """Parse a schema given as a string. A long one is refused unparsed, since the parser holds Python's lock."""
    if not isinstance(schema, str):
        return schema
    if (size := len(schema)) > MAX_WRITTEN:
        raise too_many(size, "characters of a JSON schema", MAX_WRITTEN)
    try:
        return from_json(schema)
    except ValueError:
        return None  # not an object


Schema = Annotated[
    JsonObject,
    in_one_sentence('give a JSON schema such as {"type": …}, as an object or as a string'),
    BeforeValidator(from_text, json_schema_input_type=JsonObject | str),
]
Choices = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of json, json_object, regex and choice.

    Accepted and ignored: disable_any_whitespace and disable_additional_properties, which always apply here;
    whitespace_pattern; disable_fallback, since there is no other backend.
    """

    content: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    disable_fallback: bool = False
    whitespace_pattern: str | None = None
    grammar: Annotated[None, in_one_sentence(UNKNOWN)] = None
    structural_tag: Annotated[None, in_one_sentence(UNKNOWN)] = None

    @model_validator(mode="after")
    def check_one(self) -> Self:
        """Require exactly one form."""
        given = (self.content, self.json_object, self.regex, self.choice)
        if sum(each is not None for each in given) != 1 or self.json_object is False:
            raise PydanticCustomError("forms", "give one of json, json_object (true), regex and choice")
        return self

    @property
    def form(self) -> OutputForm:
        """Return the form."""
        schema = {"type": "object"} if self.json_object else self.content
        return OutputForm(schema, regex=self.regex, choices=self.choice or (), param="structured_outputs")


class JsonSchema(Body):
    """A schema with a name. It is always enforced, with or without `strict`."""

    name: Name = "answer"
    description: str = ""
    content: JsonObject = Field({"type": "object"}, alias="schema")
    strict: bool = False


class ResponseFormat(Body):
    """The form of the answer: any text, a JSON object, or JSON that fits a schema.

    schema: with the type json_object, as in llama.cpp and older clients.
    """

    param: ClassVar[str] = "response_format"

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    object_schema: JsonObject = Field({"type": "object"}, alias="schema")

    @property
    def form(self) -> OutputForm | None:
        """Return the required output form; None for any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return OutputForm(self.object_schema, param=self.param)
        if self.json_schema is None:
            raise UserError("a format of type json_schema needs a schema", param=self.param)
        return OutputForm(self.json_schema.content, param=self.param)


class Guided(Body):
    """Parameters of completions and chats that ask for an output form, `guided_…` by older names.

    Accepted and ignored: guided_decoding_backend, guided_whitespace_pattern.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None

    @property
    def form(self) -> OutputForm | None:
        """Return the required output form; None for any text. UserError if several are asked for."""
        forms = [asked.form for asked in (self.response_format, self.structured_outputs) if asked is not None]
        for kind, name in (("schema", "guided_json"), ("regex", "guided_regex"), ("choices", "guided_choice")):
            if (given := getattr(self, name)) is not None:
                forms.append(OutputForm(**{kind: given}, param=name))
        found = [form for form in forms if form is not None]
        if len(found) > 1:
            names = " and ".join(form.param for form in found)
            raise UserError(f"{names} ask for different output formats; give one", param=found[1].param)
        return found[0] if found else None
