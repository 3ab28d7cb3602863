"""Lesson 7. Compiles output forms into the engine's grammars, with llguidance (Moskal et al.; Microsoft, MIT).

Compiling takes milliseconds for usual schemas and has limits for the others. It runs in a thread of its own and without
Python's lock. llguidance builds most of a grammar when it is first used, so the same thread rehearses the beginning of
an answer: what fails there is refused before the engine hears of it. llguidance is imported when the first request asks
for a form.
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from mini_engine.engine.grammar import Grammar
from mini_engine.errors import UserError
from mini_engine.server.output_forms import OutputForm
from mini_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
PATIENCE = 10.0  # seconds for compiling; a schema within the limits takes far less
REHEARSED = 3  # tokens: an object's first brace already lists all of its properties
LIMITS: dict[
    str, Any
] = {  # llguidance's, lower than its own: the engine's thread waits about 30 ms for a mask, at most
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
}
REASONS = {  # llguidance's words for limits that schemas meet, and what they mean for a client
    "NoExtensionBias": "nothing fits it; does a $ref lead back to itself?",
    "Too many items": "too much can come next; does a $ref lead back to itself without an end?",
    "items; max is": "too many properties can come next; make more of them required, or use fewer",
    "too many expressions": "a pattern, or a number of repetitions, is too large",
    "fuel": "a pattern, or a number of repetitions, is too large",
}
SPECIAL = b"\xff"  # llguidance's mark of a control token: no text begins with this byte
SHOWN = 300  # characters of llguidance's reasons


class CompiledGrammar:
    """An engine's Grammar. Every matcher is a copy of the compiled one."""

    def __init__(self, compiled: "LLMatcher") -> None:
        self.compiled = compiled

    def matcher(self) -> "GuidedMatcher":
        """Return a matcher at the beginning of an answer."""
        return GuidedMatcher(self.compiled)


class GuidedMatcher:
    """An engine's Matcher over a copy of one of llguidance's, which never raises but keeps its first error."""

    def __init__(self, compiled: "LLMatcher") -> None:
        self.compiled, self.inner = compiled, compiled.deep_copy()
        self.taken: list[int] = []
        self.is_over = False
        self.error: str | None = None

    def mask(self) -> bytes:
        """Return a bit for each token id."""
        return self.inner.compute_bitmask()

    def push(self, token_id: int) -> None:
        """Take the token that was chosen."""
        self.taken.append(token_id)
        self.inner.consume_token(token_id)
        self.is_over = self.inner.is_stopped()
        if self.inner.is_error():
            self.error = f"the answer cannot go on in the form asked for: {reason_of(self.inner)}"

    def num_valid(self, drafts: Sequence[int]) -> int:
        """Return how many of `drafts` may come next, one after the other, without ending the answer."""
        count = self.inner.validate_tokens(list(drafts))
        return count - self.look_ahead(drafts[:count], lambda inner: inner.is_stopped()) if count else 0

    def mask_after(self, drafts: Sequence[int]) -> bytes:
        """Return a bit for each token id: 1 if it may come behind `drafts`."""
        return self.look_ahead(drafts, lambda inner: inner.compute_bitmask())

    def look_ahead(self, drafts: Sequence[int], look: "Callable[[LLMatcher], T]") -> T:
        """Return what `look` finds behind `drafts`, and roll back.

        A limit may be reached there which this answer never meets, and llguidance's errors are for good: in that case,
        a new matcher takes the answer's tokens again.
        """
        self.inner.consume_tokens(list(drafts))
        found = look(self.inner)
        if not self.inner.rollback(len(drafts)):
            self.inner = self.compiled.deep_copy()
            self.inner.consume_tokens(self.taken)
        return found


class GrammarCompiler:
    """Makes grammars for one tokenizer and model.

    Args:
        vocab_size: the model's.
        eos_token_ids: the model's end tokens, one of which ends an answer that could also go on.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self.thread = ThreadPoolExecutor(1, "grammars")

    async def compile(self, form: OutputForm) -> Grammar:
        """Compile off the event loop.

        Raises:
            UserError: a schema is invalid, too large, or uses what llguidance does not know; or it takes too long.
        """
        work = asyncio.get_running_loop().run_in_executor(self.thread, self.compile_sync, form)
        try:
            return await asyncio.wait_for(work, PATIENCE)
        except TimeoutError:
            raise UserError(f"the JSON schema was not compiled within {PATIENCE:g} seconds; make it simpler") from None

    def compile_sync(self, form: OutputForm) -> Grammar:
        """Compile in this thread."""
        form.check()
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ModuleNotFoundError:
            raise UserError("structured output and tools need llguidance: pip install 'kv-course[server]'") from None
        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        compiled = LLMatcher(self.vocabulary, form.grammar(), log_level=0, limits=limits)
        self.check(compiled, form)
        for opening in form.openings:
            self.check(self.rehearsed(compiled, opening), form)
        return CompiledGrammar(compiled)

    def rehearsed(self, compiled: "LLMatcher", opening: str) -> "LLMatcher":
        """Return a copy of the matcher, a few tokens into an answer that begins with `opening`."""
        matcher = compiled.deep_copy()
        matcher.consume_tokens(self.vocabulary.greedy_tokenize(opening))
        for _ in range(REHEARSED):
            mask = matcher.compute_bitmask()
            if matcher.is_stopped():
                break
            matcher.consume_token(lowest(mask))
        return matcher

    def check(self, matcher: "LLMatcher", form: OutputForm) -> None:
        """Raise UserError if the matcher has failed."""
        if matcher.is_error():
            param = "tools" if form.functions else "response_format"
            raise UserError(f"the JSON schema cannot be used: {reason_of(matcher)}", param=param)

    @functools.cached_property
    def vocabulary(self) -> "LLTokenizer":
        """The tokens by their bytes, as llguidance holds them."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(Vocabulary(self)), self.vocab_size)

    @property
    def end_token_id(self) -> int:
        """The token that ends an answer: the model's, or the tokenizer's, or else the last of its control tokens."""
        named = self.tokenizer.end_token_id
        found = [*self.eos_token_ids, *([] if named is None else [named]), *sorted(self.tokenizer.special_ids)[-1:]]
        if not found:
            raise UserError("this checkpoint has no end token, so no structured output can end")
        return found[0]


class Vocabulary:
    """What llguidance reads of a tokenizer."""

    bos_token_id = None

    def __init__(self, compiler: GrammarCompiler) -> None:
        tokenizer = compiler.tokenizer
        marked = [
            SPECIAL + token if index in tokenizer.special_ids else token
            for index, token in enumerate(tokenizer.token_bytes[: compiler.vocab_size])
        ]
        self.tokens = marked + [b""] * (compiler.vocab_size - len(marked))
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id = compiler.end_token_id
        self.encode = tokenizer.encode

    def __call__(self, text: Any) -> list[int]:
        """Encode a text, which may come as bytes."""
        return self.encode(text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text)


def lowest(mask: bytes) -> int:
    """The lowest token id that a mask allows."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def reason_of(matcher: "LLMatcher") -> str:
    """Why a matcher has failed: in the words of REASONS, or else in the first line of its own."""
    message = matcher.get_error().strip().split("\n", 1)[0][:SHOWN]
    return next((reason for sign, reason in REASONS.items() if sign in message), message)
