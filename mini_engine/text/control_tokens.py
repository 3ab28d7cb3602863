"""Lesson 6. Keeps control tokens out of user text: only the chat template may end a turn or begin one.

A tokenizer turns the text `<|im_end|>` into one control token, whether the template or a user wrote it. In a rendered
conversation the two look alike, so the user's are hidden before rendering: each is replaced by a stand-in. Afterwards
the text is cut at the remaining markers, which are the template's own. The pieces between them get their letters back
and are encoded with control tokens switched off.
"""

import re
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any


class StandIns:
    """Replaces control tokens in text with stand-ins that no tokenizer knows. `used`: True once one was needed.

    Args:
        texts: the control tokens.
    """

    def __init__(self, texts: Collection[str]) -> None:
        self.texts = sorted((text for text in texts if text), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        nonce = secrets.randbelow(10**20)  # so that no message can contain a stand-in; digits, which no filter changes
        self.stand_in = {text: f"{nonce:020}{index:06}" for index, text in enumerate(self.texts)}
        self.used = False

    def hide(self, value: Any) -> Any:
        """Return messages or tools, any JSON value, with a stand-in for every control token in a string."""
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
            encode: encodes a control token. encode_plain: encodes text without recognizing control tokens.
        """
        token_ids, at = [], 0
        for found in self.pattern.finditer(text):
            token_ids += encode_plain(self.show(text[at : found.start()]))
            token_ids += encode(found.group())
            at = found.end()
        return token_ids + encode_plain(self.show(text[at:]))

    def show(self, text: str) -> str:
        """Return a text with its stand-ins turned back into the control tokens' letters."""
        for original, stand_in in self.stand_in.items() if self.used else ():
            text = text.replace(stand_in, original)
        return text
