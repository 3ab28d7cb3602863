"""Lesson 7. The types of values in a request's body, validated strictly.

A number is a number ("5" and true are not), null means left out, and an unknown name is an error: see `errors.refusal`.
Validation of a list or a dict stops at its first wrong entry, so that many of them cost no more than one.
"""

import functools
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from mini_engine.engine.sampling_params import MAX_BIAS, NUMBERS
from mini_engine.server.json_text import JsonObject

MAX_STOPS = 16
MAX_SESSION_ID = 256
MAX_IDS = 1024  # stop ids and biases, which are checked one by one


def in_one_sentence(sentence: str) -> WrapValidator:
    """Report `sentence` if a value does not fit, instead of one error for each alternative of a union.

    In the sentence, {expected} stands for the values of a Literal.
    """

    def check(value: Any, handler: Any) -> Any:
        try:
            found = handler(value)
            is_equal_only = isinstance(value, int | float) and type(found) is not type(value)
            return handler(None) if is_equal_only else found  # a Literal takes 0 for False
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise PydanticCustomError("sentence", sentence, first.get("ctx")) from None  # type: ignore[arg-type]

    return WrapValidator(check)


harmless = in_one_sentence("this server supports only {expected}; leave it out")  # clients often spell out a default
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Nothing = Annotated[list[Any], Field(max_length=0)]
Ids = Annotated[list[int], Field(fail_fast=True)]
SessionId = Annotated[
    Annotated[str, Field(min_length=1, max_length=MAX_SESSION_ID)],
    in_one_sentence(f"give a text of 1 to {MAX_SESSION_ID} characters that names the conversation"),
]
StopIds = Annotated[list[int], Field(fail_fast=True, max_length=MAX_IDS)]
Stop = Annotated[
    str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)],
    in_one_sentence(f"give a text, or a list of at most {MAX_STOPS} texts"),
]


def shown(**keywords: Any) -> Any:
    """Return keywords for /openapi.json alone: the value is checked elsewhere, with a clearer message."""
    return Field(json_schema_extra=keywords)


def between(name: str) -> Any:
    """Return /openapi.json's range of a number that SamplingParams checks."""
    return shown(minimum=NUMBERS[name].least, maximum=NUMBERS[name].most)


def too_many(count: int, things: str, most: int) -> PydanticCustomError:
    """Return the error for more than `most` things."""
    context = {"count": count, "things": things, "most": most}
    return PydanticCustomError("too_long", "{count} {things}, more than {most}", context)


TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, shown(minimum=-MAX_BIAS, maximum=MAX_BIAS)]
Biases = Annotated[dict[TokenId, Bias], Field(fail_fast=True, max_length=MAX_IDS), shown(additionalProperties=False)]


@functools.cache
def names_of(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of a model's fields in JSON."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class Body(BaseModel, extra="forbid", strict=True):
    """A JSON object in which null means left out and an unknown name is an error."""

    @model_validator(mode="before")
    @classmethod
    def leave_out_nulls(cls, data: Any) -> Any:
        """Drop keys whose value is null, and all unknown names but the first: one error is enough."""
        if not isinstance(data, dict):
            return data
        names = names_of(cls)
        if None not in data.values() and data.keys() <= names:
            return data
        given = {key: value for key, value in data.items() if value is not None}
        unknown = next((key for key in given if key not in names), None)
        kept = given if unknown is None else {*names, unknown}
        return {key: value for key, value in given.items() if key in kept}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        found = handler(core)
        schema = handler.resolve_ref_schema(found)
        for name in set(schema.get("properties", {})) - set(schema.get("required", ())):
            schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}
        return found


class Shown(Body):
    """A JSON object that chat templates see as the client sent it, in its order, without cache marks."""

    _given: JsonObject = PrivateAttr({})

    @model_validator(mode="wrap")
    @classmethod
    def keep(cls, data: Any, handler: Any) -> Any:
        """Keep the object as it was given."""
        found = handler(data)
        found._given = data
        return found

    @property
    def for_template(self) -> JsonObject:
        """Return the object as it was given."""
        return {key: unmarked(value) for key, value in self._given.items() if not (value is None or key == MARK)}


MARK = "cache_control"


def unmarked(value: Any) -> Any:
    """Return the value without cache marks in an object or in the objects of a list."""
    if isinstance(value, list):
        return [unmarked(each) if isinstance(each, dict) else each for each in value]
    return {key: each for key, each in value.items() if key != MARK} if isinstance(value, dict) else value
