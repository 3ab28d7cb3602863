"""Lesson 7. The schemas of tools' parameters: enforced as far as llguidance supports them, instead of refused.

A client describes its tools for the model, often with keywords that no grammar can enforce. So anything that cannot be
enforced is left out, and arguments are always an object, whatever the schema says: clients expect nothing else.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mini_engine.base.errors import UserError
from mini_engine.grammars.schemas import (
    NOTES,
    JsonObject,
    check_parts,
    check_schema,
    holds_schemas,
    mapped,
    without_notes,
)

ANY_OBJECT: JsonObject = {"type": "object"}
NO_ARGUMENTS: JsonObject = {"type": "object", "properties": {}}
OTHER_TYPES = {"null", "boolean", "integer", "number", "string", "array"}
MAX_TRIALS = 100


def of_object(schema: JsonObject) -> JsonObject:
    """Return the schema restricted to objects; one without arguments if it is empty or describes another type.

    A type that is not in JSON Schema, such as Gemini's OBJECT, is ignored.
    """
    kind = schema.get("type")
    kinds = [each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)]
    is_other = bool(kinds) and OTHER_TYPES.issuperset(kinds)
    return NO_ARGUMENTS if is_other or schema.keys() <= {*NOTES} else schema | {"type": "object"}


def bounded(functions: Mapping[str, JsonObject], room: int) -> dict[str, JsonObject]:
    """Return the schemas of functions, without notes; any object for those that are too large to be compiled.

    Args:
        room: characters that all of them may have together, in addition to those of schemas for any object.
    """
    found = {}
    for name, schema in functions.items():
        small = small_enough(schema)
        size = len(json.dumps(small)) - len(json.dumps(ANY_OBJECT))
        fits = size <= room
        found[name] = small if fits else ANY_OBJECT
        room -= size if fits else 0
    return found


def small_enough(schema: JsonObject) -> JsonObject:
    """Return a schema without notes; any object if it is too large."""
    try:
        check_parts(schema, "tools", skipped=NOTES)
        small = without_notes(schema)
        check_schema(small, "tools")
    except UserError:
        return ANY_OBJECT
    return small


def relaxations(schema: JsonObject, works: Callable[[JsonObject], bool]) -> Iterator[JsonObject]:
    """Yield less and less strict schemas.

    Args:
        works: returns True if a schema can be compiled.
    """
    yield schema
    yield Pruner(schema, works).pruned(schema)
    yield ANY_OBJECT


class Pruner:
    """Drops the parts of a schema that do not work alone, such as an invalid pattern.

    Args:
        root: the schema. works: returns True if a schema can be compiled; called at most MAX_TRIALS times.
    """

    def __init__(self, root: JsonObject, works: Callable[[JsonObject], bool]) -> None:
        self.root, self.works = root, works
        self.tried: dict[str, bool] = {}

    def pruned(self, schema: Any) -> Any:
        """Return the working part of a schema."""
        if not isinstance(schema, dict):
            return schema
        kind = schema.get("type")
        base = {"type": kind} if self.holds({"type": kind}) else {}
        kept = {}
        for key, value in schema.items():
            if key == "patternProperties" and isinstance(value, dict):
                value = {name: each for name, each in value.items() if self.holds({"pattern": name})}
            if holds_schemas(key, value) or self.works_in(base, key, value):
                kept[key] = value
        found = mapped(kept, lambda each, _: self.pruned(each))
        is_closed = "$ref" in found or "$ref" not in schema
        return found if is_closed else {"additionalProperties": True, **found}  # the dropped part may have named others

    def works_in(self, base: JsonObject, key: str, value: Any) -> bool:
        """Return True if a keyword works beside the schema's type alone."""
        return self.leads_somewhere(value) if key == "$ref" else self.holds(base | {key: value})

    def holds(self, schema: JsonObject) -> bool:
        """Return True if this works alone."""
        key = json.dumps(schema)
        if key not in self.tried:
            self.tried[key] = len(self.tried) < MAX_TRIALS and self.works(schema)
        return self.tried[key]

    def leads_somewhere(self, reference: Any) -> bool:
        """Return True if a $ref names a part of this schema."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return False
        place: Any = self.root
        for name in filter(None, reference[1:].split("/")):
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(place, dict) or name not in place:
                return False
            place = place[name]
        return True
