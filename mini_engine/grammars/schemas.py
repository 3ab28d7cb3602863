"""Lesson 7. JSON schemas from clients: limited in size before compiling, and closed to unnamed properties."""

import json
from collections.abc import Callable, Collection
from typing import Any

from mini_engine.base.errors import UserError

JsonObject = dict[str, Any]

MAX_CHARACTERS = 2**15
MAX_VALUES = 2000
MAX_DEPTH = 32
BY_NAME = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")  # hold schemas by name
BRANCHED = ("anyOf", "oneOf")
LISTED = (*BRANCHED, "allOf", "prefixItems")  # keywords whose values are lists of schemas
ALONE = ("items", "additionalProperties")  # keywords whose value is one schema
NOTES = ("title", "description", "$comment", "default", "examples")  # do not affect which values fit
ADDING = ("then", "else", "dependentSchemas")  # may name more properties
OPEN_ON_PURPOSE = ("additionalProperties", "unevaluatedProperties", "patternProperties", *ADDING)


def check_schema(schema: JsonObject, param: str) -> None:
    """Raise UserError if the schema is too long or too deep or has too many values. param: the request's parameter."""
    check_parts(schema, param)
    if (size := len(json.dumps(schema))) > MAX_CHARACTERS:
        raise UserError(f"a JSON schema has {size} characters, more than {MAX_CHARACTERS}", param=param)


def check_parts(schema: JsonObject, param: str, skipped: Collection[str] = ()) -> None:
    """Raise UserError if the schema is too deep or has too many values. skipped: keywords that do not count."""
    left: list[tuple[Any, int, bool]] = [(schema, 1, False)]
    count = 0
    while left:
        value, depth, by_name = left.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise UserError(f"a JSON schema is nested deeper than {MAX_DEPTH}; flatten it", param=param)
        if count > MAX_VALUES:
            raise UserError(f"a JSON schema has more than {MAX_VALUES} values; shorten it", param=param)
        if isinstance(value, dict):
            counted = value.items() if by_name else ((key, each) for key, each in value.items() if key not in skipped)
            left += [(each, depth + 1, not by_name and key in BY_NAME) for key, each in counted]
        elif isinstance(value, list):
            left += [(each, depth + 1, False) for each in value]


def holds_schemas(key: str, value: Any) -> bool:
    """Return True if the value of a schema's keyword is one schema, or several."""
    return isinstance(value, list) if key in LISTED else key in (*BY_NAME, *ALONE) and isinstance(value, dict)


def mapped(schema: JsonObject, change: Callable[[Any, str], Any]) -> JsonObject:
    """Return a copy of a schema with every schema directly inside it changed. change: is given the keyword, too."""
    found = dict(schema)
    for key, value in schema.items():
        if not holds_schemas(key, value):
            continue
        if key in BY_NAME:
            found[key] = {name: change(each, key) for name, each in value.items()}
        else:
            found[key] = [change(each, key) for each in value] if key in LISTED else change(value, key)
    return found


def without_notes(schema: Any, _key: str = "") -> Any:
    """Return the schema without annotations, which only readers need."""
    if not isinstance(schema, dict):
        return schema
    return mapped({key: value for key, value in schema.items() if key not in NOTES}, without_notes)


def closed(schema: JsonObject) -> JsonObject:
    """Forbid properties that the schema does not name, unless it says something about them.

    Every value that fits the result also fits the schema. By default, JSON Schema allows any further property, and a
    weak model then invents one after another. Schemas that combine others with `allOf`, or add properties to a `$ref`,
    are left unchanged.
    """
    return schema if combines(schema) else _closed(schema)


def named(schema: Any, _key: str = "") -> Any:
    """Return the schema with `propertyNames`, as zod writes them for a record, in keywords that llguidance supports."""
    if not isinstance(schema, dict):
        return schema
    found = mapped(schema, named)
    names = found.get("propertyNames")
    if not isinstance(names, dict) or "properties" in found or "patternProperties" in found:
        return found
    rest = {key: value for key, value in found.items() if key != "propertyNames"}
    value = rest.get("additionalProperties", {})
    match {key: each for key, each in names.items() if (key, each) != ("type", "string") and key not in NOTES}:
        case {"enum": [*several], **more} if not more and all(isinstance(name, str) for name in several):
            return rest | {"properties": dict.fromkeys(several, value), "additionalProperties": False}
        case {"const": str(name), **more} if not more:
            return rest | {"properties": {name: value}, "additionalProperties": False}
        case {"pattern": str(pattern), **more} if not more:
            return rest | {"patternProperties": {pattern: value}, "additionalProperties": False}
        case {**more} if not more:
            return rest
    return found


def combines(schema: Any) -> bool:
    """Return True if a part of the schema has `allOf`, or properties beside a `$ref`."""
    if not isinstance(schema, dict):
        return False
    inner: list[Any] = []
    mapped(schema, lambda each, key: inner.append(each))
    return "allOf" in schema or {"$ref", "properties"} <= schema.keys() or any(map(combines, inner))


def _closed(schema: Any, adds: bool = False) -> Any:
    """Close a schema. adds: its properties come in addition to those of the enclosing schema."""
    if not isinstance(schema, dict):
        return schema
    has_more = adds or ("properties" in schema and any(map(has_properties, branches(schema))))
    found = mapped(schema, lambda each, key: _closed(each, (has_more and key in BRANCHED) or key in ADDING))
    is_open = any(schema.get(key, False) is not False for key in OPEN_ON_PURPOSE)
    if "properties" in schema and not has_more and not is_open:
        found["additionalProperties"] = False
    return found


def branches(schema: JsonObject) -> list[Any]:
    """Return the alternatives of a schema: an object must fit one of them in addition to the schema itself."""
    lists = (schema.get(key) for key in BRANCHED)
    return [each for several in lists if isinstance(several, list) for each in several]


def has_properties(schema: Any) -> bool:
    """Return True if a schema names properties."""
    return isinstance(schema, dict) and "properties" in schema
