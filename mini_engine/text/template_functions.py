"""Lesson 6. What chat templates may use: the settings, functions and extensions that transformers gives them."""

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
        """The tag's content, in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class DictMaker:
    """`dict`, without the type itself, whose attributes a template has no business with."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict:
        """As `dict.fromkeys`."""
        return dict.fromkeys(keys, value)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is. Jinja's own filter would escape HTML's characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    """Let a template refuse a conversation."""
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    """The date, for templates that tell the model what day it is."""
    return datetime.now().strftime(format)


def sandbox() -> ImmutableSandboxedEnvironment:
    """Return the environment that templates run in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now, "dict": DictMaker()}
    return environment
