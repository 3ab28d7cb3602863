"""Course machinery. Lesson 6's trace: tokens are bytes; what is shown, what is held back, what is never shown."""

from typing import Any

from scripts.traces.tape import Tape, ask, plural

STOP = "User:"
FIRST, SECOND = "A café: 5 €, Us, User: no", "Hi 😀"
CUT = 1  # tokens missing at the end of the second answer
DETOKENIZER = "mini_engine/text/detokenizer.py::Detokenizer"
CHECKER = "mini_engine/text/detokenizer.py::StopChecker"


def tape() -> Tape:
    return Tape("l6-bytes", "l6_text/bytes.trace.js", "bytes", "From tokens to characters", {"stop": STOP}, 15)


class Answer:
    """One answer on its way through detokenizer and stop strings."""

    def __init__(self, tape: Tape, tokenizer) -> None:
        from mini_engine.text.detokenizer import Detokenizer, StopChecker

        self.tape, self.tokenizer = tape, tokenizer
        self.detokenizer = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
        self.checker = StopChecker([STOP])
        self.tokens: list[int] = []
        self.text = self.shown = ""  # what the bytes have become, and how much of it was shown
        self.stop: str | None = None

    def push(self, token: int) -> str:
        """Add a token. Returns the text that it completes."""
        self.tokens.append(token)
        text = self.detokenizer.push(token)
        self.take(text)
        return text

    def take(self, text: str) -> None:
        self.text += text
        checked = self.checker.push(text)
        self.shown += checked.text
        self.stop = checked.stop

    def finish(self) -> None:
        self.take(self.detokenizer.finish())
        self.shown += self.checker.finish()

    @property
    def num_bytes(self) -> int:
        return sum(len(self.tokenizer.token_bytes[token]) for token in self.tokens)

    def state(self, is_over: bool = False) -> dict[str, Any]:
        tokens = [{"id": token, "bytes": self.tokenizer.token_bytes[token].hex(" ")} for token in self.tokens]
        chars = spans_of(self.text, self.num_bytes, is_over)
        return {"tokens": tokens, "chars": chars, "shown": self.shown, "held": self.checker.held, "stop": self.stop}


def spans_of(text: str, num_bytes: int, is_over: bool) -> list[list[Any]]:
    """Pair each character with its number of bytes. At the end, the last one stands for all bytes that are left."""
    sizes = [len(char.encode()) for char in text]
    if is_over and sizes:
        sizes[-1] += num_bytes - sum(sizes)
    return [list(span) for span in zip(text, sizes, strict=True)]


def record(tape: Tape) -> None:
    from mini_engine.pocket import POCKET_DIR
    from mini_engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(POCKET_DIR)
    answer = Answer(tape, tokenizer)
    tape.frame(
        "The tokens of an answer arrive one by one. Each is a few bytes. The answer ends at the stop string "
        f"“{STOP}”, of which the reader must never see any part.",
        code=DETOKENIZER,
        **answer.state(),
    )
    ends_at_a_stop(answer, tokenizer.encode(FIRST))
    is_cut_short(Answer(tape, tokenizer), tokenizer.encode(SECOND)[:-CUT])


def ends_at_a_stop(answer: Answer, ids: list[int]) -> None:
    """Record a frame for each token. Tokens that pass straight through share a frame."""
    tape, passed, state = answer.tape, "", {}
    for token in ids:
        held = answer.checker.held
        text = answer.push(token)
        if text.isascii() and text and not held and not answer.checker.held and answer.stop is None:
            passed, state = passed + text, answer.state()
            continue
        if passed:
            said = f"“{passed}”: plain ASCII, one byte per character. It is shown at once."
            tape.frame(said, code=f"{DETOKENIZER}.push", **state)
            passed = ""
        code = f"{DETOKENIZER if not text.isascii() or not text else CHECKER}.push"
        tape.frame(*tale(answer, token, text, held), code, **answer.state())
        if answer.stop is not None:
            return


def tale(answer: Answer, token: int, text: str, held: str):
    """Describe what happened to a token that did not pass straight through, perhaps with a question."""
    raw = answer.tokenizer.token_bytes[token]
    if not text:
        return tale_of_a_part(answer, token, raw)
    if not text.isascii():
        size = len(text.encode())
        return (
            f"Token {token}, the byte {raw.hex(' ')}, ends a character of {plural(size, 'byte')}: “{text}” is shown.",
            None,
        )
    if answer.stop is not None:
        question = ask(
            "The next token is “:”. How much of “User:” does the reader see?",
            "nothing",
            ("“User”", "“User:”"),
            "It was held back from its first letter on, and a completed stop string is discarded.",
        )
        return (
            f"“{text}” completes “{answer.stop}”. The answer ends here, and no part of the stop string was shown.",
            question,
        )
    if answer.checker.held:
        return tale_of_a_wait(answer, text)
    return f"“{text}”: no stop string begins with “{held}{text}”. The text that was held back is shown.", None


def tale_of_a_part(answer: Answer, token: int, raw: bytes):
    """Describe a token that begins or continues a character without completing it."""
    waiting = answer.num_bytes - len(answer.text.encode())
    have, alone = ("has", "it") if waiting == 1 else ("have", "they")
    why = f"{plural(waiting, 'byte')} of a character {have} arrived, and more must follow. Alone, {alone} would be “�”."
    question = None
    if not any("ask" in frame for frame in answer.tape.frames):
        question = ask(
            f"The next token is the byte {raw.hex()}, the first of an “é”. What does the reader see?",
            "nothing yet",
            ("�", "é", "Ã"),
            why,
        )
    return f"Token {token} is the byte {raw.hex(' ')}. {why} Nothing is shown.", question


def tale_of_a_wait(answer: Answer, text: str):
    """Describe a token whose text may begin a stop string, and is held back."""
    held, question = answer.checker.held, None
    if not any("stop string" in frame.get("ask", {}).get("question", "") for frame in answer.tape.frames):
        question = ask(
            f"The next token is “{text}”, and the stop string is “{STOP}”. How much of the token is shown?",
            shown_of(text, held),
            ("all of it", "nothing"),
            f"A stop string may begin here. “{held}” is held back until that is decided.",
        )
    return f"“{text}”: “{held}” may be the beginning of “{STOP}”, so it is held back.", question


def shown_of(text: str, held: str) -> str:
    """Say in words how much of `text` is shown."""
    return "the space" if text.removesuffix(held) == " " else "all of it" if not held else "nothing"


def is_cut_short(answer: Answer, ids: list[int]) -> None:
    """Record an answer that reaches its maximum length in the middle of a character."""
    for token in ids:
        answer.push(token)
    answer_state = answer.state()
    waiting = answer.num_bytes - len(answer.text.encode())
    answer.tape.frame(
        f"Another answer: “{answer.text}”, then an emoji of 4 bytes. It has reached max_tokens with only "
        f"{plural(waiting, 'byte')} of the emoji.",
        code=f"{DETOKENIZER}.push",
        **answer_state,
    )
    answer.finish()
    answer.tape.frame(
        f"It ends here. Bytes that never became a character are shown as “{answer.text[-1]}”, so that the reader knows "
        "that something is missing.",
        ask(
            "The answer ends in the middle of an emoji. What happens to its bytes?",
            answer.text[-1],
            ("they are left out", "😀", "an error"),
            "The deltas add up to what decoding everything at once gives, and that ends in one replacement character.",
        ),
        code=f"{DETOKENIZER}.finish",
        **answer.state(is_over=True),
    )
