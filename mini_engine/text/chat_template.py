"""Lesson 6. Chat templates: a conversation written as the text that the checkpoint was trained on.

A template is a small Jinja program in the checkpoint. It may come from anyone, so it runs in Jinja's sandbox, with the
settings, functions and extensions that transformers gives it: both render the same text.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mini_engine.errors import UserError


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; for inference only its content matters."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The tag's content, in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja program.
        special_tokens: names a template may use, such as `eos_token`, with their texts.

    Attributes:
        takes_tools: the template can describe tools and their calls.

    Raises:
        UserError: `source` is not a Jinja program.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = to_json
        environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now, "dict": make_dict}
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise UserError(f"this checkpoint's chat template cannot be used: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The conversation as text, up to where the assistant speaks.

        Args:
            tools: functions that the assistant may call, in OpenAI's form.

        Raises:
            UserError: the template refuses these messages.
        """
        given = {"messages": list(messages), "tools": tools or None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(**self.special_tokens | given)
        except Exception as error:  # templates raise whatever their author chose
            raise UserError(f"the chat template refuses these messages: {error}") from error


def find_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The source of a checkpoint's chat template: chat_template.jinja, or what its tokenizer_config.json holds.

    Raises:
        UserError: the file is not text.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as text: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several, each with a name
        source = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}.get("default")
    return source if isinstance(source, str) else None


# What templates call.


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


def strftime_now(pattern: str) -> str:
    """The date, for templates that tell the model what day it is."""
    return datetime.now().strftime(pattern)


def make_dict(*args: Any, **kwargs: Any) -> dict:
    """A dict, without the type itself, whose attributes a template has no business with."""
    return dict(*args, **kwargs)
