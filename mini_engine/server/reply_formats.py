"""Lesson 7. The two reply formats of OpenAI's API: completions and chats."""

from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

from mini_engine.engine.sampled import TokenLogprobs
from mini_engine.server.json_text import JsonObject
from mini_engine.text.tokenizer import Tokenizer

Scored = tuple[int, TokenLogprobs | None]  # a token id with its logprobs; a prompt's first token has none


class CompletionFormat:
    """One answer of `/v1/completions`: takes the text as it comes, returns parts of chunks, and at the end all.

    Attributes:
        opening: the first chunk of a stream, or None.
        text: what has been shown so far. offset: characters of the tokens with logprobs so far.
    """

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"
    opening: ClassVar[JsonObject | None] = None

    def __init__(self) -> None:
        self.text = ""
        self.offset = 0

    def push(self, text: str, ended: bool = False, cut: bool = False) -> JsonObject:
        """Take the answer's next text; return its addition to the answer, for a chunk.

        Args:
            ended: this is the last text. cut: max_tokens ended it.
        """
        self.text += text
        return {"text": text}

    @property
    def message(self) -> JsonObject:
        """The whole answer."""
        return {"text": self.text}

    def reason(self, reason: str | None) -> str | None:
        """Return the finish reason."""
        return reason

    def logprobs(self, scored: Sequence[Scored], tokenizer: Tokenizer) -> JsonObject:
        """Return the log probabilities of the next tokens.

        Here these are four lists with an entry for each token. Alternatives, by text, include the chosen token.
        """
        texts = [token_text(token_id, tokenizer) for token_id, _ in scored]
        *offsets, self.offset = accumulate(map(len, texts), initial=self.offset)
        logprobs = [found for _, found in scored]
        return {
            "tokens": texts,
            "token_logprobs": [found and found.chosen for found in logprobs],
            "top_logprobs": [
                found and best_by_text(text, found, tokenizer) for text, found in zip(texts, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }


class ChatFormat(CompletionFormat):
    """One answer of `/v1/chat/completions`: the same parts under other names."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"
    opening: ClassVar[JsonObject | None] = {"delta": {"role": "assistant", "content": ""}}

    def push(self, text: str, ended: bool = False, cut: bool = False) -> JsonObject:
        """Take the next text; return the addition to the assistant's turn."""
        self.text += text
        return {"delta": {"content": text} if text else {}}

    @property
    def message(self) -> JsonObject:
        """The assistant's turn."""
        return {"message": {"role": "assistant", "content": self.text}}

    def logprobs(self, scored: Sequence[Scored], tokenizer: Tokenizer) -> JsonObject:
        """Return a list with an entry for each token, with its bytes, since a token may not be whole characters."""
        return {
            "content": [
                chat_token(token_id, found.chosen, tokenizer)
                | {"top_logprobs": [chat_token(other, value, tokenizer) for other, value in found.top]}
                for token_id, found in scored
                if found is not None
            ]
        }


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token as text. Bytes that form no whole character become U+FFFD."""
    return tokenizer.token_bytes[token_id].decode("utf-8", errors="replace")


def best_by_text(text: str, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the alternatives and the chosen token by text. Of several with the same text, the best counts."""
    worst_first = [(token_text(other, tokenizer), value) for other, value in reversed(logprobs.top)]
    found = {text: logprobs.chosen} | dict(worst_first)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> JsonObject:
    """Return a token as an entry of a chat's logprobs."""
    token = tokenizer.token_bytes[token_id]
    return {"token": token_text(token_id, tokenizer), "logprob": logprob, "bytes": list(token)}
