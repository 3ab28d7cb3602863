"""Course machinery. Checks data against a JSON Schema, as far as `scripts.machine.schema` uses its keywords."""

import re
from typing import Any

TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip


def mistakes(data: Any, schema: dict[str, Any], place: str) -> list[str]:
    """Return the mistakes in `data`, a sentence each. Supports the JSON Schema keywords that `schema` uses."""
    if "anyOf" in schema:
        found = [mistakes(data, each, place) for each in schema["anyOf"]]
        return [] if [] in found else found[0]
    if "enum" in schema or "const" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        right = any(type(data) is type(one) and data == one for one in allowed)
        return [] if right else [f"{place} is {shown(data)}; allowed: {', '.join(map(str, allowed))}"]
    kind = schema["type"]
    if not isinstance(data, TYPES[kind]) or (isinstance(data, bool) and kind != "boolean"):
        return [f"{place} is {shown(data)}, which is no {kind}"]
    if isinstance(data, dict):
        return in_object(data, schema, place)
    if isinstance(data, list):
        if len(data) > schema["maxItems"]:
            return [f"{place} has {len(data)} items; at most {schema['maxItems']} are allowed"]
        return [said for i, item in enumerate(data) for said in mistakes(item, schema["items"], f"{place}[{i}]")]
    return in_value(data, schema, place)


def in_object(data: dict[str, Any], schema: dict[str, Any], place: str) -> list[str]:
    """Return the mistakes in an object."""
    known, others = schema.get("properties", {}), schema["additionalProperties"]
    found = [f"{place} lacks {name!r}" for name in schema.get("required", ()) if name not in data]
    for name, value in data.items():
        if name in known:
            found += mistakes(value, known[name], f"{place}.{name}")
        elif others is False:
            found.append(f"{place} has {shown(name)}, which no report has")
        else:
            found += mistakes(value, others, f"{place}.{shown(name)}")
    return found


def in_value(data: Any, schema: dict[str, Any], place: str) -> list[str]:
    """Return the mistakes in a string or a number."""
    if isinstance(data, str):
        if len(data) > schema["maxLength"]:
            return [f"{place} has {len(data)} characters; at most {schema['maxLength']} are allowed"]
        if not re.search(schema.get("pattern", ""), data):
            return [f"{place} is {shown(data)}, which does not match {schema['pattern']}"]
    elif "minimum" in schema and not schema["minimum"] <= data < float("inf"):
        return [f"{place} is {data}; it must be {schema['minimum']} or more, and finite"]
    return []


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
