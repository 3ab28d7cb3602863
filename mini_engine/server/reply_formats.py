"""Lesson 7. The two reply formats of OpenAI's API: completions and chats."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mini_engine.engine.sampled import TokenLogprobs
from mini_engine.text.tokenizer import Tokenizer

JsonObject = dict[str, Any]


class TokenLogprob(NamedTuple):
    """One token of an answer with its logprobs. `offset`: the characters of the answer before it.

    logprobs: None for a prompt's first token, which has no prediction.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int


class PlainReader:
    """Reads one answer that is plain text.

    Args:
        reply_format: its shape.
    """

    def __init__(self, reply_format: "ReplyFormat") -> None:
        self.reply_format = reply_format
        self.text = ""

    def push(self, text: str, ended: bool = False, cut: bool = False) -> JsonObject:
        """Take the answer's next text; return it as a part of a chunk."""
        self.text += text
        return self.reply_format.piece(text)

    @property
    def message(self) -> JsonObject:
        """Return the whole answer."""
        return self.reply_format.message(self.text)

    def reason(self, reason: str | None) -> str | None:
        """Return the finish reason."""
        return reason


class ReplyFormat:
    """The differences between completions and chats. `opening`: the first chunk of a stream, or None."""

    kind: str
    chunk_kind: str
    id_prefix: str
    opening: JsonObject | None = None

    def reader(self) -> Any:
        """Return a reader for one choice: it takes the text and returns parts of chunks, and at the end a message."""
        return PlainReader(self)

    def message(self, text: str) -> JsonObject:
        """Return the text of a whole answer."""
        raise NotImplementedError

    def piece(self, text: str) -> JsonObject:
        """Return the next text of a streamed answer."""
        raise NotImplementedError

    def logprobs(self, tokens: Sequence[TokenLogprob], tokenizer: Tokenizer) -> JsonObject:
        """Return the log probabilities of these tokens."""
        raise NotImplementedError


class CompletionFormat(ReplyFormat):
    """`/v1/completions`."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def message(self, text: str) -> JsonObject:
        """Return the text itself."""
        return {"text": text}

    piece = message

    def logprobs(self, tokens: Sequence[TokenLogprob], tokenizer: Tokenizer) -> JsonObject:
        """Return four lists with an entry for each token. Alternatives, by text, include the chosen token."""
        texts = [token_text(token.token_id, tokenizer) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprobs and token.logprobs.chosen for token in tokens],
            "top_logprobs": [
                token.logprobs and best_by_text(text, token.logprobs, tokenizer)
                for text, token in zip(texts, tokens, strict=True)
            ],
            "text_offset": [token.offset for token in tokens],
        }


class ChatFormat(ReplyFormat):
    """`/v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self) -> None:
        self.opening = {"delta": {"role": "assistant", "content": ""}}

    def message(self, text: str) -> JsonObject:
        """Return the assistant's turn."""
        return {"message": {"role": "assistant", "content": text}}

    def piece(self, text: str) -> JsonObject:
        """Return the addition to the turn."""
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, tokens: Sequence[TokenLogprob], tokenizer: Tokenizer) -> JsonObject:
        """Return a list with an entry for each token, with its bytes, since a token may not be whole characters."""
        return {
            "content": [
                chat_token(token.token_id, token.logprobs.chosen, tokenizer)
                | {"top_logprobs": [chat_token(other, value, tokenizer) for other, value in token.logprobs.top]}
                for token in tokens
                if token.logprobs is not None
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
