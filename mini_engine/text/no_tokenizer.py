"""Lesson 6. The stand-in for a missing tokenizer: ids in, ids out, and no text."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mini_engine.base.errors import UserError
from mini_engine.text.tokenizer import TokenBytes, Tokenizer


class NoTokenizer(Tokenizer):
    """A tokenizer without tokens: every id has the text "". Methods that need text raise UserError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config, self.named_tokens = {}, {}
        self.special_ids, self.special_texts = frozenset(), []
        self.token_bytes = TokenBytes()

    @property
    def end_token_id(self) -> int | None:
        """Return None."""
        return None

    def check_stops(self, stops: Collection[str]) -> None:
        """Raise UserError if there are stop strings, which can only be found in text."""
        if stops:
            self._refuse("stop strings are found in text", "stop")

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Raise UserError."""
        self._refuse("a prompt of text cannot be encoded", "prompt")

    def encode_chat(self, *args: Any, **kwargs: Any) -> list[int]:
        """Raise UserError."""
        self._refuse("a conversation cannot be encoded", "messages")

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Raise UserError."""
        self._refuse("ids cannot be decoded", "token_ids")

    def _refuse(self, what: str, param: str) -> NoReturn:
        raise UserError(
            f"{what}, since {self.directory} has no tokenizer.json; use token ids, or a checkpoint that has one",
            param=param,
        )
