"""Lesson 7. JSON schemas from clients: limited in size before compiling, and closed to unnamed properties."""

import json
from collections.abc import Collection, Iterator
from typing import Any

from mini_engine.base.errors import UserError

JsonObject = dict[str, Any]

MAX_CHARACTERS = 2**15
MAX_VALUES = 2000
MAX_DEPTH = 32
NAMED = ("properties", "$defs", "definitions")  # keywords whose values hold schemas by name
BY_NAME = (*NAMED, "patternProperties", "dependentSchemas")
BRANCHED = ("anyOf", "oneOf")
LISTED = (*BRANCHED, "prefixItems")  # keywords whose values are lists of schemas
ALONE = ("items", "additionalProperties")  # keywords whose value is one schema
LITERAL = ("enum", "const", "default", "examples", "required")  # keywords whose values are data, not schemas
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


def without_notes(schema: Any) -> Any:
    """Return the schema without annotations, which only readers need."""
    if isinstance(schema, list):
        return [without_notes(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key not in NOTES}
    for key in kept.keys() - {*LITERAL}:
        value, by_name = kept[key], key in BY_NAME and isinstance(kept[key], dict)
        kept[key] = {n: without_notes(each) for n, each in value.items()} if by_name else without_notes(value)
    return kept


def closed(schema: JsonObject) -> JsonObject:
    """Forbid properties that the schema does not name, unless it says something about them.

    Every value that fits the result also fits the schema. By default, JSON Schema allows any further property, and a
    weak model then invents one after another. Schemas that combine others with `allOf`, or add properties to a `$ref`,
    are left unchanged.
    """
    combines = any("allOf" in each or {"$ref", "properties"} <= each.keys() for each in subschemas(schema))
    return schema if combines else _closed(schema)


def named(schema: Any) -> Any:
    """Return the schema with `propertyNames`, as zod writes them for a record, in keywords that llguidance supports."""
    if isinstance(schema, list):
        return [named(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in LITERAL else named(value) for key, value in schema.items()}
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


def subschemas(schema: Any) -> Iterator[JsonObject]:
    """Yield the schema and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        several = [value] if key in ALONE else value if key in LISTED else ()
        if key in NAMED and isinstance(value, dict):
            several = value.values()
        for each in several if not isinstance(several, str | int | float | None) else ():
            yield from subschemas(each)


def _closed(schema: Any, adds: bool = False) -> Any:
    """Close a schema. adds: its properties come in addition to those of the enclosing schema."""
    if not isinstance(schema, dict):
        return schema
    has_more = adds or ("properties" in schema and any(map(has_properties, branches(schema))))
    found = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            value = {name: _closed(each) for name, each in value.items()}
        elif key in LISTED and isinstance(value, list):
            value = [_closed(each, has_more and key in BRANCHED) for each in value]
        elif key in ALONE:
            value = _closed(value)
        found[key] = value
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
