"""Lesson 7. JSON schemas of forms and tools, good and bad ones, and what fits them."""

import json
from typing import Any

INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
DIGIT = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
BOTH = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
TOWN = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["port", "mine"]},
    },
    "required": ["name", "size", "kind"],
}


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    """A function that a client offers."""
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


ADD = tool(BOTH, "add")


def as_schema(schema: Any) -> dict[str, Any]:
    """The response_format that asks for a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def is_town(text: str) -> bool:
    """Whether the text is JSON that fits TOWN."""
    found = json.loads(text)
    fits = set(found) == {"name", "size", "kind"} and len(found["name"]) <= 8 and found["kind"] in ("port", "mine")
    return fits and isinstance(found["size"], int) and 0 <= found["size"] <= 999


def is_digit(text: str) -> bool:
    """Whether the text is JSON that fits DIGIT."""
    found = json.loads(text)
    return list(found) == ["n"] and 0 <= found["n"] <= 9


def nested(depth: int) -> dict[str, Any]:
    """A schema of objects in objects."""
    return {} if depth == 0 else {"type": "object", "properties": {"a": nested(depth - 1)}}


def wide(count: int) -> dict[str, Any]:
    """A schema of an object with many optional properties."""
    return {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(count)}}


ITSELF = {"$ref": "#/$defs/a"}
BAD_SCHEMAS = {
    "unknown type": {"type": "objekt"},
    "unknown keyword": {"type": "string", "not": {"const": "x"}},
    "unknown format": {"type": "string", "format": "zip code"},
    "bad pattern": {"type": "string", "pattern": "("},
    "far away": {"$ref": "https://example.com/schema"},
    "too deep": nested(40),
    "too wide": wide(3000),
    "too long": {"type": "string", "description": "x" * 40_000},
    "nothing fits": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "refers to itself": ITSELF | {"$defs": {"a": ITSELF}},
    "has no end": ITSELF | {"$defs": {"a": {"type": "object", "properties": {"x": ITSELF}, "required": ["x"]}}},
    "too many optional properties": wide(550),
    "too large a pattern": {"type": "string", "pattern": "^((a{100}){100}){100}$"},
}
