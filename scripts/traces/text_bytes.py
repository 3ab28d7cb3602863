"""Course machinery. Lesson 6's trace: tokens are bytes; some text is shown, some held back, some never shown."""

from typing import Any

from scripts.traces.tape import Tape, ask, plural

from mini_engine.engine.answer import AnswerText
from mini_engine.text.detokenizer import Detokenizer

STOP = "User:"
FIRST, SECOND = "A café: 5 €, Us, User: no", "Hi 😀"
CUT = 1  # tokens missing at the end of the second answer
DETOKENIZER = "mini_engine/text/detokenizer.py::Detokenizer"
CHECKER = "mini_engine/text/detokenizer.py::StopChecker"


class TextBytes(Tape):
    """One answer after another, passing through detokenizer and stop strings.

    said: the text of the bytes so far. shown: the part that a reader has seen.
    """

    def __init__(self) -> None:
        super().__init__("l6-bytes", "l6_text/bytes.trace.js", "bytes", "From tokens to characters", 15, stop=STOP)
        self.begin()

    def begin(self) -> None:
        """Begin an answer."""
        self.answer = AnswerText(self.tokenizer, [STOP])
        self.characters = Detokenizer(self.tokenizer.token_bytes, self.tokenizer.special_ids)  # before stop strings
        self.tokens: list[int] = []
        self.said = self.shown = ""
        self.is_over = False

    def push(self, token: int) -> str:
        """Add a token. Return the text that it completes."""
        text = self.characters.push(token)
        self.tokens.append(token)
        self.said += text
        self.shown += self.answer.push(token)
        return text

    def finish(self) -> None:
        self.said += self.characters.finish()
        self.shown += self.answer.finish()
        self.is_over = True

    @property
    def held(self) -> str:
        """The text that may be the beginning of a stop string."""
        return self.answer.checker.held

    def bytes_of(self, token: int) -> bytes:
        return self.tokenizer.token_bytes[token]

    @property
    def waiting(self) -> int:
        """The number of bytes that have not become a character yet."""
        return sum(len(self.bytes_of(token)) for token in self.tokens) - len(self.said.encode())

    def state(self) -> dict[str, Any]:
        """Return the frame's state. chars: each character with its number of bytes; the last one may cover the rest."""
        tokens = [{"id": token, "bytes": self.bytes_of(token).hex(" ")} for token in self.tokens]
        chars = [[char, len(char.encode())] for char in self.said]
        if self.is_over:
            chars[-1][1] += self.waiting
        return {"tokens": tokens, "chars": chars, "shown": self.shown, "held": self.held, "stop": self.answer.stop}

    def record(self) -> None:
        self.show(
            f"Each token is a few bytes. The answer ends at “{STOP}”, of which the reader must see nothing.",
            DETOKENIZER,
        )
        self.ends_at_a_stop()
        self.is_cut_short()

    def ends_at_a_stop(self) -> None:
        """Record a frame for each token. Tokens that pass straight through share a frame."""
        passed, state = "", {}
        for token in self.tokenizer.encode(FIRST):
            held = self.held
            text = self.push(token)
            if text.isascii() and text and not held and not self.held and self.answer.stop is None:
                passed, state = passed + text, self.state()
                continue
            if passed:
                said = f"“{passed}”: plain ASCII, one byte per character. It is shown at once."
                self.show(said, f"{DETOKENIZER}.push", **state)
                passed = ""
            say, question = self.tale(token, text, held)
            self.show(say, f"{CHECKER if text.isascii() and text else DETOKENIZER}.push", question)
            if self.answer.stop is not None:
                return

    def tale(self, token: int, text: str, held: str):
        """Describe what happened to a token that did not pass straight through, perhaps with a question."""
        if not text:
            return self.tale_of_a_part(self.bytes_of(token), f"Token {token} is the byte ")
        if not text.isascii():
            ends = f"ends a character of {plural(len(text.encode()), 'byte')}: “{text}” is shown."
            return f"Token {token}, the byte {self.bytes_of(token).hex(' ')}, {ends}", None
        if self.answer.stop is not None:
            why = "It was held back from its first letter on, and a completed stop string is discarded."
            wrong = ("“User”", "“User:”")
            question = ask("The next token is “:”. How much of “User:” does the reader see?", "nothing", wrong, why)
            said = f"“{text}” completes “{self.answer.stop}”. The answer ends here, and no part of the stop string "
            return f"{said}was shown.", question
        if self.held:
            return self.tale_of_a_wait(text)
        return f"“{text}”: no stop string begins with “{held}{text}”. The text that was held back is shown.", None

    def is_asked(self, word: str) -> bool:
        """Return True if a question with this word has been asked."""
        return any(word in frame.get("ask", {}).get("question", "") for frame in self.frames)

    def tale_of_a_part(self, raw: bytes, begins: str):
        """Describe a token that begins or continues a character without completing it."""
        have, alone = ("has", "it") if self.waiting == 1 else ("have", "they")
        why = f"{plural(self.waiting, 'byte')} of a character {have} arrived, and more must follow. "
        why += f"Alone, {alone} would be “�”."
        question = None
        if not self.is_asked("?"):
            text = f"The next token is the byte {raw.hex()}, the first of an “é”. What does the reader see?"
            question = ask(text, "nothing yet", ("�", "é", "Ã"), why)
        return (
            f"{begins}{raw.hex(' ')}: {plural(self.waiting, 'byte')} of a character so far. Nothing is shown.",
            question,
        )

    def tale_of_a_wait(self, text: str):
        """Describe a token whose text may begin a stop string, and is held back."""
        held, question = self.held, None
        if not self.is_asked("stop string"):
            shown = "the space" if text.removesuffix(held) == " " else "all of it" if not held else "nothing"
            why = f"A stop string may begin here. “{held}” is held back until that is decided."
            asked = f"The next token is “{text}”, and the stop string is “{STOP}”. How much of the token is shown?"
            question = ask(asked, shown, ("all of it", "nothing"), why)
        return f"“{text}”: “{held}” may begin “{STOP}”, so it is held back.", question

    def is_cut_short(self) -> None:
        """Record an answer that reaches its maximum length in the middle of a character."""
        self.begin()
        for token in self.tokenizer.encode(SECOND)[:-CUT]:
            self.push(token)
        self.show(
            f"Another answer, “{self.said}” and an emoji, is cut by max_tokens after {self.waiting} of the emoji's 4 "
            "bytes.",
            f"{DETOKENIZER}.push",
        )
        self.finish()
        text = "The answer ends in the middle of an emoji. What happens to its bytes?"
        why = "The deltas add up to what decoding everything at once gives, and that ends in one replacement character."
        self.show(
            f"It ends here. Bytes that never became a character are shown as “{self.said[-1]}”: something is missing.",
            f"{DETOKENIZER}.finish",
            ask(text, self.said[-1], ("they are left out", "😀", "an error"), why),
        )
