"""Lesson 7. The output form as vLLM's clients ask for it: JSON, a regular expression, or choices."""

import json
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from mini_engine.errors import UserError
from mini_engine.grammars.output_forms import OutputForm
from mini_engine.grammars.schemas import MAX_CHARACTERS
from mini_engine.server.fields import Body, Flag, Text, in_one_sentence, of_whole_characters, only
from mini_engine.server.json_text import JsonObject

MAX_CHOICES = 1024
MAX_WRITTEN = 4 * MAX_CHARACTERS  # characters of a schema that comes as a string, which may be indented
UNKNOWN = "this server does not support client grammars; use json, regex or choice"


def from_text(schema: Any) -> Any:
    """Parse a schema given as a string. A long one is refused unparsed, since json holds Python's lock."""
    if not isinstance(schema, str):
        return schema
    if (size := len(of_whole_characters(schema))) > MAX_WRITTEN:
        raise PydanticCustomError(
            "too_long", "the JSON schema has {size} characters, more than {most}", {"size": size, "most": MAX_WRITTEN}
        )
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        return None  # not an object


Schema = Annotated[
    JsonObject,
    in_one_sentence('give a JSON schema such as {"type": …}, as an object or as a string'),
    BeforeValidator(from_text, json_schema_input_type=JsonObject | Text),
]
Choices = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of json, json_object, regex and choice.

    Accepted and ignored: disable_any_whitespace and disable_additional_properties, which always apply here;
    whitespace_pattern; disable_fallback, since there is no other backend.
    """

    content: Schema | None = Field(None, alias="json")
    json_object: Flag | None = None
    regex: Text | None = None
    choice: Choices | None = None
    disable_any_whitespace: Flag = False
    disable_additional_properties: Flag = False
    disable_fallback: Flag = False
    whitespace_pattern: Text | None = None
    grammar: Annotated[Any, only(None, sentence=UNKNOWN)] = None
    structural_tag: Annotated[Any, only(None, sentence=UNKNOWN)] = None

    @model_validator(mode="after")
    def check_one(self) -> Self:
        """Require exactly one form."""
        given = (self.content, self.json_object, self.regex, self.choice)
        if sum(each is not None for each in given) != 1 or self.json_object is False:
            raise PydanticCustomError("forms", "give one of json, json_object (true), regex and choice")
        return self

    def form(self) -> OutputForm:
        """Return the form."""
        schema = {"type": "object"} if self.json_object else self.content
        return OutputForm(schema, regex=self.regex, choices=self.choice or (), param="structured_outputs")


class Guided(Body):
    """Parameters of completions and chats: `structured_outputs`, and its older names.

    Accepted and ignored: guided_decoding_backend, guided_whitespace_pattern.
    """

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_decoding_backend: Text | None = None
    guided_whitespace_pattern: Text | None = None

    @property
    def forms(self) -> list[OutputForm]:
        """Return the forms that these parameters ask for. More than one is an error; see `one_form`."""
        found = [
            OutputForm(**{kind: given}, param=f"guided_{name}")
            for kind, name in (("schema", "json"), ("regex", "regex"), ("choices", "choice"))
            if (given := getattr(self, f"guided_{name}")) is not None
        ]
        return [self.structured_outputs.form(), *found] if self.structured_outputs else found


def one_form(forms: list[OutputForm]) -> OutputForm | None:
    """Return the form that a request asks for; None for any text. UserError if it asks for several."""
    if len(forms) > 1:
        names = " and ".join(form.param for form in forms)
        raise UserError(f"{names} ask for different output formats; give one", param=forms[1].param)
    return forms[0] if forms else None
