"""Lesson 7. The kinds of values in a request's body, checked strictly.

A number is a number ("5" and true are not), null means left out, and an unknown name is an error: see `errors.refusal`.
A list is refused at its first wrong entry, so that a long list of them costs no more than one.
"""

from typing import Annotated, Any

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

MAX_STOPS = 16
MAX_IDS = 1024  # of those that are checked one by one: stop ids, biases
HALF = "half_a_character"


def in_one_sentence(sentence: str) -> WrapValidator:
    """Report `sentence` if none of a union's alternatives fits, instead of one error for each alternative."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if any(one["type"] == HALF for one in error.errors(include_url=False, include_input=False)):
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
Ids = Annotated[list[Whole], Field(fail_fast=True)]
StopIds = Annotated[list[Whole], Field(fail_fast=True, max_length=MAX_IDS)]
Stop = Annotated[
    Text | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_STOPS)],
    in_one_sentence(f"give a text, or a list of at most {MAX_STOPS} texts"),
]


def only(*allowed: Any) -> AfterValidator:
    """Accept a parameter only with a value that changes nothing here: clients often spell out the default."""

    def check(value: Any) -> Any:
        if value not in allowed:
            names = " or ".join(map(repr, allowed))
            raise PydanticCustomError("only", "this server supports only {names}; leave it out", {"names": names})
        return value

    return AfterValidator(check)


class Body(BaseModel):
    """A JSON object in which null means left out and an unknown name is an error."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def leave_out_nulls(cls, data: Any) -> Any:
        """Drop the keys whose value is null. Of unknown names, keep the first: one refusal is enough."""
        if not isinstance(data, dict):
            return data
        names = {field.alias or name for name, field in cls.model_fields.items()}
        given = {key: value for key, value in data.items() if value is not None}
        unknown = next((key for key in given if key not in names), None)
        kept = given if unknown is None else {*names, unknown}
        return {key: value for key, value in given.items() if key in kept}
