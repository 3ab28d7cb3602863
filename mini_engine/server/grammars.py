"""Lesson 7. Compiles output forms into the engine's grammars, with llguidance (Moskal et al.; Microsoft, MIT).

Compiling takes milliseconds for usual schemas and has limits for the others. It runs in a thread of its own and without
Python's lock. llguidance is imported when the first request asks for a form.
"""

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from mini_engine.engine.grammar import Grammar
from mini_engine.errors import UserError
from mini_engine.server.output_forms import OutputForm
from mini_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

PATIENCE = 10.0  # seconds for compiling; a schema within the limits takes far less
SPECIAL = b"\xff"  # llguidance's mark of a control token: no text begins with this byte
SHOWN = 300  # characters of llguidance's reasons


class CompiledGrammar:
    """An engine's Grammar. Every matcher is a copy of the compiled one."""

    def __init__(self, compiled: "LLMatcher") -> None:
        self.compiled = compiled

    def matcher(self) -> "GuidedMatcher":
        """Return a matcher at the beginning of an answer."""
        return GuidedMatcher(self.compiled.deep_copy())


class GuidedMatcher:
    """An engine's Matcher over one of llguidance's, which never raises but keeps its first error."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self.inner = matcher
        self.is_over = False
        self.error: str | None = None

    def mask(self) -> bytes:
        """Return a bit for each token id."""
        return self.inner.compute_bitmask()

    def push(self, token_id: int) -> None:
        """Take the token that was chosen."""
        self.inner.consume_token(token_id)
        self.is_over = self.inner.is_stopped()
        if self.inner.is_error():
            self.error = f"the grammar of this answer cannot go on: {first_line(self.inner.get_error())}"


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
            raise UserError("structured output and tools need llguidance; install the extra 'server'") from None
        limits = LLParserLimits(verbose_errors=False, max_grammar_size=100_000)
        compiled = LLMatcher(self.vocabulary, form.grammar(), log_level=0, limits=limits)
        if compiled.is_error():
            param = "tools" if form.functions else "response_format"
            reason = first_line(compiled.get_error())
            raise UserError(f"the JSON schema cannot be used: {reason}", param=param)
        return CompiledGrammar(compiled)

    @functools.cached_property
    def vocabulary(self) -> "LLTokenizer":
        """The tokens by their bytes, as llguidance holds them."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(Vocabulary(self)), self.vocab_size)

    @property
    def end_token_id(self) -> int:
        """The token that ends an answer: the model's, or the tokenizer's, or else the last of its control tokens."""
        named = self.tokenizer.backend.token_to_id(self.tokenizer.named_tokens.get("eos_token", ""))
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


def first_line(text: str) -> str:
    """The first line of a reason, not too long."""
    return text.strip().split("\n", 1)[0][:SHOWN]
