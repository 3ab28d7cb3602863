"""Lesson 6. Keeps control tokens out of what people write: only the chat template may end a turn or begin one.

A tokenizer turns the text `<|im_end|>` into one control token, whoever wrote it. In a rendered conversation the
template's markers and a user's letters look alike, so the user's are hidden before rendering: each is replaced by a
stand-in. Afterwards the text is cut at the markers that are left, which are the template's own. The pieces between them
get their letters back and are encoded with control tokens switched off.
"""

import re
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any


class StandIns:
    """Replaces control tokens in text by stand-ins that no tokenizer knows. `used`: whether any was needed.

    Args:
        texts: the control tokens.
    """

    def __init__(self, texts: Collection[str]) -> None:
        self.texts = sorted((text for text in texts if text), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        nonce = secrets.randbelow(10**20)  # so that no message can hold a stand-in; digits, which no filter changes
        self.stand_in = {text: f"{nonce:020}{index:06}" for index, text in enumerate(self.texts)}
        self.used = False

    def hide(self, value: Any) -> Any:
        """Return messages or tools, as JSON has them, with a stand-in for every control token in a text."""
        if isinstance(value, str):
            return self.pattern.sub(self._hide_one, value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(each) for each in value]
        return value

    def _hide_one(self, found: re.Match[str]) -> str:
        self.used = True
        return self.stand_in[found.group()]

    def encode(
        self, text: str, encode: Callable[[str], list[int]], encode_plain: Callable[[str], list[int]]
    ) -> list[int]:
        """Encode a rendered conversation.

        Args:
            encode: encodes a control token. encode_plain: encodes a text in which nothing is a control token.
        """
        token_ids, at = [], 0
        for found in self.pattern.finditer(text):
            token_ids += encode_plain(self.show(text[at : found.start()]))
            token_ids += encode(found.group())
            at = found.end()
        return token_ids + encode_plain(self.show(text[at:]))

    def show(self, text: str) -> str:
        """Return a text with the letters of the control tokens again."""
        for original, stand_in in self.stand_in.items() if self.used else ():
            text = text.replace(stand_in, original)
        return text
