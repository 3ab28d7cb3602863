"""Lesson 6. A checkpoint's tokenizer: text to ids, a conversation to ids, and the bytes behind each id.

Qwen3's vocabulary is byte-level: a token is a sequence of bytes, not of characters, and may end in the middle of a
character. tokenizer.json spells each byte as one printable character (Radford et al. 2019, GPT-2). Llama 2 and Mistral
7B have pieces of text, spaces written as "▁", and a token for each byte of what no piece has: "<0xE2>" (Kudo and
Richardson, 2018, arXiv:1808.06226).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from mini_engine.base.errors import UserError, first_line, warn_once
from mini_engine.checkpoint.directory import resolve_checkpoint
from mini_engine.text.chat_messages import as_expected
from mini_engine.text.control_tokens import StandIns
from mini_engine.text.prompts import checked_variables
from mini_engine.text.special_tokens import added_tokens, read_tokenizer_config, special_tokens
from mini_engine.text.tool_messages import CALL_MARKS, calls_as_text, tools_as_text

if TYPE_CHECKING:  # Jinja is imported with the first conversation
    from mini_engine.text.chat_template import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@cache
def byte_of_character() -> dict[str, int]:
    """Map the 256 printable stand-ins to bytes: printable bytes stand for themselves, the others from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def bytes_of_token(token: str) -> bytes:
    """Return the bytes of one vocabulary entry, spelled with `byte_of_character`'s stand-ins.

    An entry with any character that is not a stand-in is plain text as a whole: its bytes are its UTF-8.
    """
    table = byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode("utf-8")


def bytes_of_piece(piece: str) -> bytes:
    """Return the bytes of one entry of a vocabulary of pieces; "<0xE2>" is a single byte."""
    if BYTE.fullmatch(piece):
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode("utf-8")


class TokenBytes(list[bytes]):
    """The bytes of each id; b"" for an id beyond the last: a model may have more rows than the tokenizer has tokens.

    Such rows pad the embedding, and any of them may be sampled.
    """

    def __getitem__(self, index: Any) -> Any:
        """Return the bytes of an id, or a slice as a plain list."""
        return b"" if isinstance(index, int) and index >= len(self) else super().__getitem__(index)


def open_backend(directory: Path) -> tokenizers.Tokenizer:
    """Load the tokenizer from a checkpoint directory's tokenizer.json.

    Raises:
        UserError: the file does not exist, cannot be read, or has a vocabulary without a token for each byte.
    """
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise UserError(f"{directory} has no {TOKENIZER_FILE}; give a checkpoint that has one")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"{path} cannot be read as a tokenizer: {first_line(error)}") from error
    if not any(decoder in repr(backend.decoder) for decoder in ("ByteLevel", "ByteFallback")):
        raise UserError(
            f"{directory} has a tokenizer that is not byte-level and has no tokens for single bytes; this engine needs "
            "one of the two"
        )
    backend.no_truncation()
    backend.no_padding()
    return backend


class Tokenizer:
    """A checkpoint's tokenizer, as the engine uses it; the tokenizers library does the work.

    Attributes:
        token_bytes: for each id, the bytes it stands for.
        special_ids: ids of control tokens for the model, such as <|im_end|>, which are not shown; `special_texts` are
            their texts.
        call_marks: <tool_call> and </tool_call> by id, if they are control tokens. They are shown, because calls are
            parsed from an answer's text.
        named_tokens: name to text of the special tokens that have a name, such as `eos_token`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.backend = open_backend(directory)
        self.config = read_tokenizer_config(directory)
        self.named_tokens, others = special_tokens(self.config)
        self._add_missing(added_tokens(directory, self.config))
        self._mark_special([*self.named_tokens.values(), *others])
        added = self.backend.get_added_tokens_decoder()
        special = {token.content: index for index, token in added.items() if token.special}
        self.special_texts = list(special)
        self.call_marks = {mark: special.pop(mark) for mark in CALL_MARKS if mark in special}
        self.special_ids = frozenset(special.values())
        self.token_bytes = self._bytes_by_id()

    @classmethod
    def load(cls, path_or_hub_id: str | Path) -> "Tokenizer":
        """Load the tokenizer of a checkpoint directory or hub id; UserError if it has none."""
        return cls(resolve_checkpoint(path_or_hub_id))

    def check_stops(self, stops: Collection[str]) -> None:
        """Do nothing: stop strings can be found. Tokenizers without text raise UserError."""

    def _add_missing(self, tokens: Sequence[tokenizers.AddedToken]) -> None:
        """Add the tokens that tokenizer.json lacks. Files written by transformers 5 have them all."""
        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        for token in tokens:
            if token.content not in known:
                self.backend.add_tokens([token])

    def _mark_special(self, texts: Sequence[str]) -> None:
        """Mark these tokens as special. In files written by transformers, tokenizer.json has marked them already."""
        known = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        self.backend.add_special_tokens([text for text in texts if text not in known])

    def _bytes_by_id(self) -> TokenBytes:
        """Return the bytes of every id of the tokenizer; b"" for ids that it skips."""
        ids = self.backend.get_vocab(with_added_tokens=True)
        token_bytes = TokenBytes([b""] * (1 + max(ids.values(), default=-1)))
        bytes_of = bytes_of_token if "ByteLevel" in repr(self.backend.decoder) else bytes_of_piece
        for token, index in ids.items():
            token_bytes[index] = bytes_of(token)
        return token_bytes

    @property
    def end_token_id(self) -> int | None:
        """The id of the tokenizer's eos_token, if its files name one that exists."""
        return self.backend.token_to_id(self.named_tokens.get("eos_token", ""))

    def warn_of_lost_end(self, eos_token_ids: Collection[int]) -> None:
        """Warn if the tokenizer's eos_token is not among the tokens that end the model's answers."""
        if self.end_token_id is not None and self.end_token_id not in eos_token_ids:
            name = self.named_tokens["eos_token"]
            warn_once(
                f"{self.directory}: {name}, the tokenizer's eos_token, ends no answer, since the model's eos_token_id "
                f"does not name {self.end_token_id}; as in transformers, answers go on unless stop is {name!r}"
            )

    @cached_property
    def template_sources(self) -> dict[str, str]:
        """The sources of the checkpoint's chat templates, by name."""
        from mini_engine.text.chat_template import find_templates

        return find_templates(self.directory, self.config)

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        """The template for chats without tools; UserError if there is none."""
        return self._template("default")

    @cached_property
    def tool_template(self) -> "ChatTemplate":
        """The template for chats with tools: a separate one, or the same."""
        return self._template("tool_use") if "tool_use" in self.template_sources else self.chat_template

    def _template(self, name: str) -> "ChatTemplate":
        from mini_engine.text.chat_template import ChatTemplate

        if not (source := self.template_sources.get(name)):
            raise UserError("this checkpoint has no chat template; use plain text instead of a conversation")
        return ChatTemplate(source, self.named_tokens)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Encode a text as it stands, without adding special tokens.

        Args:
            add_special: add the special tokens that tokenizer.json puts around a text, if any (`post_processor`).

        Raises:
            UserError: it is not a string, or contains a lone surrogate, which is half a character and has no bytes.
        """
        if not isinstance(text, str):
            raise UserError(f"the text is of type {type(text).__name__}; give a string", param="prompt")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"the text contains {text[error.start]!r}, half a character; remove it") from None
        [found] = self.backend.encode_batch_fast([text], add_special_tokens=add_special)  # `encode` holds the GIL
        return found.ids

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text to continue, as transformers does: some checkpoints begin each text with a special token.

        A chat template writes such tokens itself, so `encode_chat` adds none.
        """
        return self.encode(text, add_special=True)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return all of `token_ids` as text, control tokens included. Bytes that form no character become U+FFFD."""
        return b"".join(self.token_bytes[index] for index in token_ids).decode("utf-8", errors="replace")

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Decode all of `token_ids` at once."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special)

    def encode_plain(self, text: str) -> list[int]:
        """Encode a text without recognizing control tokens: `<|im_end|>` becomes the tokens of its letters."""
        self.backend.encode_special_tokens = True
        try:
            return self.encode(text)
        finally:
            self.backend.encode_special_tokens = False

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        check: Callable[[str], None] = lambda text: None,
    ) -> list[int]:
        """Encode a conversation with the checkpoint's chat template, up to the start of the assistant's reply.

        Control tokens come from the template alone; in a message, `<|im_end|>` is ten characters like any others.

        Args:
            messages: dicts with `role` (system, user, assistant, tool) and `content`; `tool_calls` as in OpenAI's API.
            tools: functions that the assistant may call, in OpenAI's form.
            variables: more variables for the template, such as `enable_thinking`.
            check: called with the rendered text before it is encoded; raises UserError to refuse it.

        Raises:
            UserError: the checkpoint has no chat template, or the template refuses these messages.
        """
        template = self.tool_template if tools else self.chat_template
        stand_ins = StandIns(self.special_texts)
        try:
            messages = as_expected(messages, template)
            if not template.takes_calls:
                messages = calls_as_text(messages)
            if tools and not template.takes_tools:
                messages, tools = tools_as_text(messages, tools, template.takes_system), None
            given = (messages, tools, checked_variables(variables))
            messages, tools, variables = map(stand_ins.hide, given)
        except RecursionError:
            raise UserError("a message is nested too deeply; flatten it", param="messages") from None
        text = template.render(messages, tools, variables)
        check(stand_ins.show(text))
        return stand_ins.encode(text, self.encode, self.encode_plain) if stand_ins.used else self.encode(text)
