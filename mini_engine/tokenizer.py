"""Lesson 6. A checkpoint's tokenizer: text to ids, a conversation to ids, and the bytes behind each id.

Qwen3's vocabulary is byte-level: a token is a sequence of bytes, not of characters, and may end in the middle of a
character. tokenizer.json spells each byte as one printable character (Radford et al. 2019, GPT-2).
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from mini_engine.config import read_json
from mini_engine.errors import UserError
from mini_engine.weights import resolve_checkpoint


@cache
def byte_of_character() -> dict[str, int]:
    """Map the 256 printable stand-ins to bytes: printable bytes stand for themselves, the others from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def bytes_of_token(token: str) -> bytes:
    """Return the bytes of one vocabulary entry. An entry with a character that is no stand-in is plain text."""
    table = byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode("utf-8")


class Tokenizer:
    """What the engine needs of a checkpoint's tokenizer; transformers does the work.

    Attributes:
        token_bytes: for each id, the bytes it stands for.
        special_ids: ids of control tokens for the model, such as <|im_end|>, which are not shown.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        if not any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            raise UserError(f"{directory} has no tokenizer (tokenizer.json); give token ids, or a checkpoint with one")
        self.hf = AutoTokenizer.from_pretrained(directory)
        if '"ByteLevel"' not in self.hf.backend_tokenizer.to_str():
            raise UserError(
                f"{directory} has a tokenizer that is not byte-level; Qwen3's are, and this engine expects it"
            )
        tokens = self.hf.convert_ids_to_tokens(range(len(self.hf)))
        self.token_bytes = [b"" if token is None else bytes_of_token(token) for token in tokens]
        config = directory / "config.json"
        rows = read_json(config).get("vocab_size", 0) if config.is_file() else 0
        self.token_bytes += [b""] * (rows - len(tokens))  # ids that the model can choose, and that mean nothing
        self.special_ids = frozenset(self.hf.all_special_ids)

    @classmethod
    def load(cls, path_or_hub_id: str | Path) -> "Tokenizer":
        """Load the tokenizer of a checkpoint directory or hub id; UserError if it has none."""
        return cls(resolve_checkpoint(path_or_hub_id))

    def encode(self, text: str) -> list[int]:
        """Encode a text as it stands, without adding special tokens.

        Raises:
            UserError: the text contains a lone surrogate, which is half a character and has no bytes.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"the text contains {text[error.start]!r}, half a character; remove it") from None
        return self.hf.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """All of `token_ids` as text at once."""
        return self.hf.decode(list(token_ids), skip_special_tokens=skip_special)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Encode a conversation with the checkpoint's chat template, up to the start of the assistant's reply.

        Args:
            messages: dicts with `role` (system, user, assistant) and `content`.

        Raises:
            UserError: the checkpoint has no chat template, or the template refuses these messages.
        """
        if not self.hf.chat_template:
            raise UserError("this checkpoint has no chat template; use plain text instead of a conversation")
        try:
            ids = self.hf.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        except Exception as error:  # templates raise whatever their author chose
            raise UserError(f"the chat template refuses these messages: {error}") from error
        return list(ids)
