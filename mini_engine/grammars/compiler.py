"""Lesson 7. Compiles output forms into the engine's grammars, with llguidance (Moskal et al.; Microsoft, MIT).

Compiling takes milliseconds for usual schemas and has limits for the others. It runs in its own thread and releases
Python's lock. llguidance builds most of a grammar on first use, so the same thread rehearses the beginning of an
answer: a grammar that fails there is refused before it reaches the engine. llguidance is imported with the first
request that needs it.
"""

import asyncio
import functools
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mini_engine.base.errors import UserError
from mini_engine.engine.grammar import Grammar
from mini_engine.grammars.matchers import CompiledGrammar, reason_of
from mini_engine.grammars.output_forms import LENIENT, OPEN, OutputForm, as_json
from mini_engine.grammars.schemas import JsonObject
from mini_engine.grammars.tool_schemas import ANY_OBJECT, of_object, relaxations
from mini_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

PATIENCE = 10.0  # seconds for compiling; a schema within the limits takes far less
REHEARSED = 3  # tokens: after an object's first brace, all of its properties may come
LIMITS: dict[str, Any] = {  # llguidance's limits, lowered: the engine thread waits at most about 30 ms for a mask
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
}
SPECIAL = b"\xff"  # llguidance's mark of a control token: no text begins with this byte
SHOWN = 300  # characters of a schema in the log
MAX_TOLD = 256

log = logging.getLogger(__name__)


class GrammarCompiler:
    """Compiles grammars for one tokenizer and model.

    Args:
        vocab_size: the model's.
        eos_token_ids: the model's end tokens, one of which ends an answer that could also go on.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self.thread = ThreadPoolExecutor(1, "grammars")
        self.told: set[str] = set()

    async def compile(self, form: OutputForm) -> Grammar:
        """Compile off the event loop.

        Raises:
            UserError: a schema is invalid, too large, not supported by llguidance, or takes too long.
        """
        work = asyncio.get_running_loop().run_in_executor(self.thread, self.compile_sync, form)
        try:
            return await asyncio.wait_for(work, PATIENCE)
        except TimeoutError:
            raise UserError(f"the JSON schema was not compiled within {PATIENCE:g} seconds; make it simpler") from None

    def compile_sync(self, form: OutputForm) -> Grammar:
        """Compile in this thread."""
        try:
            import llguidance  # noqa: F401
        except ModuleNotFoundError:
            raise UserError("structured output and tools need llguidance: pip install 'kv-course[server]'") from None
        form = self.bounded(form)
        compiled = self.tried(form)
        if compiled.is_error() and form.functions:
            functions = {name: self.relaxed(name, of_object(schema)) for name, schema in form.functions.items()}
            form = replace(form, functions=functions)
            compiled = self.tried(form)
        if compiled.is_error() and form.functions:
            form = replace(form, functions=dict.fromkeys(form.functions, ANY_OBJECT))
            compiled = self.tried(form)
            self.tell("the tools' schemas are too large together: arguments may be any object")
        self.check(compiled, form)
        for warning in compiled.get_grammar_warnings():
            self.tell(f"a tool's parameters are only partly enforced: {warning}")
        return CompiledGrammar(compiled)

    def bounded(self, form: OutputForm) -> OutputForm:
        """Return a form that is small enough to be compiled; UserError if the text's own schema is not."""
        found = form.bounded()
        for name in [name for name, schema in found.functions.items() if schema is ANY_OBJECT]:
            self.tell(f"the parameters of tool {name!r} are too large to be enforced; any object is accepted")
        return found

    def tried(self, form: OutputForm) -> "LLMatcher":
        """Return the form compiled and rehearsed, or a matcher that has failed."""
        compiled = self.matcher(form.grammar(self.marks))
        for opening in () if compiled.is_error() else form.openings:
            if (rehearsed := self.rehearsed(compiled, opening)).is_error():
                return rehearsed
        return compiled

    def matcher(self, grammar: str) -> "LLMatcher":
        """Compile a grammar."""
        from llguidance import LLMatcher, LLParserLimits

        return LLMatcher(self.vocabulary, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False, **LIMITS))

    def relaxed(self, name: str, schema: JsonObject) -> JsonObject:
        """Return the enforceable part of a tool's schema."""

        def works(part: JsonObject) -> bool:
            return not self.matcher("%llguidance {}\nstart: " + as_json(part, **LENIENT)).is_error()

        fitting = (
            each
            for each in relaxations(schema, works)
            if not self.tried(OutputForm(None, {name: each}, False)).is_error()
        )
        found = next(fitting, ANY_OBJECT)
        if found != schema:
            self.tell(f"the parameters of tool {name!r} are enforced only as {json.dumps(found)[:SHOWN]}")
        return found

    def tell(self, sentence: str) -> None:
        """Log a sentence once, and at most MAX_TOLD of them: clients must not be able to fill a disk."""
        if sentence not in self.told and len(self.told) < MAX_TOLD:
            self.told.add(sentence)
            log.warning("%s", sentence)

    def rehearsed(self, compiled: "LLMatcher", opening: str) -> "LLMatcher":
        """Return a copy of the matcher, a few tokens into an answer that begins with `opening`."""
        matcher = compiled.deep_copy()
        if OPEN in self.marks and opening.startswith(OPEN):
            matcher.consume_token(self.marks[OPEN])
            opening = opening.removeprefix(OPEN)
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
            param = form.param if form.text_rule else "tools"  # tools alone have been relaxed
            raise UserError(f"the requested output format cannot be used: {reason_of(matcher)}", param=param)

    @property
    def marks(self) -> dict[str, int]:
        """Return the call marks that are control tokens of the model."""
        return {mark: index for mark, index in self.tokenizer.call_marks.items() if index < self.vocab_size}

    @functools.cached_property
    def vocabulary(self) -> "LLTokenizer":
        """Return llguidance's tokenizer: the tokens by their bytes."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(Vocabulary(self)), self.vocab_size)

    @property
    def end_token_id(self) -> int:
        """Return the token that ends an answer: the model's, the tokenizer's, or else its last control token."""
        named = self.tokenizer.end_token_id
        found = [*self.eos_token_ids, *([] if named is None else [named]), *sorted(self.tokenizer.special_ids)[-1:]]
        if not found:
            raise UserError("this checkpoint has no end token, so no structured output can end")
        return found[0]


class Vocabulary:
    """A tokenizer in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, compiler: GrammarCompiler) -> None:
        tokenizer = compiler.tokenizer
        special = {index for index in tokenizer.special_ids if index < compiler.vocab_size} | {*compiler.marks.values()}
        marked = [
            SPECIAL + token if index in special else token
            for index, token in enumerate(tokenizer.token_bytes[: compiler.vocab_size])
        ]
        self.tokens = marked + [b""] * (compiler.vocab_size - len(marked))
        self.special_token_ids = sorted(special)
        self.eos_token_id = compiler.end_token_id
        self.encode = tokenizer.encode

    def __call__(self, text: Any) -> list[int]:
        """Encode a text, given as a string or as bytes."""
        return self.encode(text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text)


def lowest(mask: bytes) -> int:
    """Return the lowest token id that a mask allows."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1
