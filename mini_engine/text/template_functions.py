"""Lesson 6. The settings, functions and extensions that chat templates may use, the same as in transformers."""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, ClassVar, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; for inference only its content matters."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the tag's content, in its own scope."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class DictMaker:
    """`dict` as a function: templates must not reach the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict:
        """Do the same as `dict.fromkeys`."""
        return dict.fromkeys(keys, value)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON. Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    """Raise an error: the way for a template to refuse a conversation."""
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    """Return the formatted date, for templates that tell the model the date."""
    return datetime.now().strftime(format)


def sandbox() -> ImmutableSandboxedEnvironment:
    """Return the environment that templates run in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now, "dict": DictMaker()}
    return environment
