"""Lesson 6. Chat templates render a conversation as text in the form that the checkpoint was trained on.

A template is a small Jinja program in the checkpoint. It is untrusted code, so it runs in Jinja's sandbox, with the
same settings, functions and extensions as in transformers: both render the same text.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes

from mini_engine.base.errors import UserError
from mini_engine.text.template_functions import sandbox

FOLDER = "additional_chat_templates"
PROBE = "system-words"
ABOUT_CALLS = {"tool_calls", "tool_call_id", "tool"}


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja program.
        special_tokens: names a template may use, such as `eos_token`, with their texts.

    Attributes, all derived from the program:
        takes_tools: the template can describe tools. takes_calls: it can write calls and their results.
        takes_all: it writes messages as JSON, whatever they hold.
        takes_text: it joins a call's arguments to a string, so it expects JSON instead of an object.
        takes_parts: it loops over a content that is a list of parts.
        takes_developer: it knows the role `developer`.

    Raises:
        UserError: `source` is not a Jinja program.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.special_tokens = dict(special_tokens)
        environment = sandbox()
        try:
            self._template = environment.from_string(source)
            program = environment.parse(source)
        except TemplateError as error:
            raise UserError(f"this checkpoint's chat template cannot be used: {error}") from error
        words = words_of(program)
        self.takes_tools = any(name.name == "tools" for name in program.find_all(nodes.Name))
        self.takes_all = dumps_messages(program)
        self.takes_calls = self.takes_tools or self.takes_all or not words.isdisjoint(ABOUT_CALLS)
        self.takes_text = joins(program, "arguments")
        looped = (name_of(loop.iter) for loop in program.find_all(nodes.For))
        self.takes_parts = self.takes_all or "content" in looped
        self.takes_developer = self.takes_all or "developer" in words

    @cached_property
    def takes_system(self) -> bool:
        """True if the template renders system messages; some, like Gemma's, refuse the role or leave it out."""
        try:
            return PROBE in self.render([{"role": "system", "content": PROBE}, {"role": "user", "content": "Hi"}])
        except UserError:
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the conversation as text, up to the assistant's turn.

        Args:
            tools: functions that the assistant may call, in OpenAI's form.
            variables: more variables for the template, such as `enable_thinking`.

        Raises:
            UserError: the template refuses these messages.
        """
        given = {"documents": None, "add_generation_prompt": True, **(variables or {})}
        given |= {"messages": list(messages), "tools": tools or None}
        try:
            return self._template.render(self.special_tokens | given)
        except Exception as error:  # templates may raise anything
            raise UserError(f"the chat template refuses these messages: {error}", param="messages") from error


def words_of(program: nodes.Node) -> set[str]:
    """Return the attribute names and strings in a template's program, without the text around it."""
    constants = (constant.value for constant in program.find_all(nodes.Const))
    attributes = (attribute.attr for attribute in program.find_all(nodes.Getattr))
    return {word for word in (*constants, *attributes) if isinstance(word, str)}


def name_of(value: nodes.Node | None) -> Any:
    """Return the name of a value in a program, if it is a variable, an attribute or an item."""
    match value:
        case nodes.Name(name=found) | nodes.Getattr(attr=found) | nodes.Getitem(arg=nodes.Const(value=found)):
            return found


def dumps_messages(program: nodes.Node) -> bool:
    """Return True if a program writes whole messages as JSON."""
    loops = [loop.target for loop in program.find_all(nodes.For) if name_of(loop.iter) == "messages"]
    names = {"messages", *(target.name for target in loops if isinstance(target, nodes.Name))}
    filtered = (each.node for each in program.find_all(nodes.Filter) if each.name == "tojson")
    return any(isinstance(value, nodes.Name) and value.name in names for value in filtered)


def joins(program: nodes.Node, name: str) -> bool:
    """Return True if a program adds a value of this name to a string, and neither filters nor tests it anywhere."""
    names = {name}  # plus those of variables that hold it
    for each in program.find_all(nodes.Assign):
        if isinstance(each.target, nodes.Name) and name_of(each.node) in names:
            names.add(each.target.name)
    added = any(not names.isdisjoint(map(name_of, (add.left, add.right))) for add in program.find_all(nodes.Add))
    return added and not any(name_of(each.node) in names for each in program.find_all((nodes.Filter, nodes.Test)))


def find_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources of a checkpoint's chat templates by name; the one for chats without tools is "default".

    Files take precedence, chat_template.jinja and those in additional_chat_templates, over tokenizer_config.json, which
    holds one template or a list of named ones.

    Raises:
        UserError: a file is not text.
    """
    named = config.get("chat_template")
    if isinstance(named, str):
        named = [{"name": "default", "template": named}]
    entries = [each for each in named if isinstance(each, dict)] if isinstance(named, list) else []
    configured = {each.get("name"): each.get("template") for each in entries}
    default = directory / "chat_template.jinja"
    files = {"default": default} if default.is_file() else {}
    files |= {path.stem: path for path in sorted((directory / FOLDER).glob("*.jinja"))}
    found = {name: read_template(path) for name, path in files.items()} or configured
    found = {"default": configured.get("default")} | found
    return {name: source for name, source in found.items() if isinstance(name, str) and isinstance(source, str)}


def read_template(path: Path) -> str:
    """Return the text of a template's file; UserError if it is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as text: {error}") from error
