"""Lesson 7. The form of an answer's text as vLLM's clients ask for it: JSON, a regular expression, or choices."""

import json
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from mini_engine.errors import UserError
from mini_engine.server.fields import Body, Flag, JsonObject, Text, in_one_sentence, only
from mini_engine.server.output_forms import OutputForm

MAX_CHOICES = 1024
UNKNOWN = "this server knows no grammars of clients; use json, regex or choice"

Schema = Annotated[JsonObject | Text, in_one_sentence("give a JSON schema, as an object or as a text")]
Choices = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of json, json_object, regex and choice.

    Accepted and ignored: disable_any_whitespace, disable_additional_properties, both of which are so here;
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
        """One form, no more and no less."""
        given = (self.content, self.json_object, self.regex, self.choice)
        if sum(each is not None for each in given) != 1 or self.json_object is False:
            raise PydanticCustomError("forms", "give one of json, json_object (true), regex and choice")
        return self

    def form(self, param: str) -> OutputForm:
        """The form. `param`: where the client asked for it."""
        if self.json_object:
            return OutputForm({"type": "object"}, param=param)
        if self.content is not None:
            return OutputForm(schema_of(self.content, param), param=param)
        return OutputForm(regex=self.regex, choices=tuple(self.choice or ()), param=param)


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
        """The forms that these parameters ask for: at most one can be had."""
        given = {"json": self.guided_json, "regex": self.guided_regex, "choice": self.guided_choice}
        older = [(f"guided_{kind}", {kind: value}) for kind, value in given.items() if value is not None]
        found = [StructuredOutputs.model_validate(content).form(param) for param, content in older]
        newer = self.structured_outputs
        return found if newer is None else [newer.form("structured_outputs"), *found]


def schema_of(content: JsonObject | str, param: str) -> JsonObject:
    """A JSON schema, which may come as a text. UserError if that is no object in JSON."""
    try:
        schema = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise UserError(f'{param} has a JSON schema that is no object; give one such as {{"type": …}}', param=param)
    return schema


def one_form(forms: list[OutputForm]) -> OutputForm | None:
    """The form that a request asks for; None for any text. UserError if it asks for several."""
    if len(forms) > 1:
        names = " and ".join(form.param for form in forms)
        raise UserError(f"{names} ask for different forms of the answer; give one", param=forms[1].param)
    return forms[0] if forms else None
