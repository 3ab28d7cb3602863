"""Course machinery. Facts that the pocket models were taught, in phrasings that their training text did not have.

Each fact had several phrasings: statements that end in the object, and questions that a user asks. Of some facts one
was held out, although other facts taught that phrasing. Completing such a line therefore takes both the fact and the
phrasing, not one memorized line. `held_out.txt` has a line for each: what is asked, an arrow, the answer.
"""

from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("held_out.txt")


class Line(NamedTuple):
    """One way to say a fact: a prompt and the text that completes it.

    Fields:
        prompt: a statement up to its object ("The capital of Japan is"), or a user's question.
        answer: the required continuation (" Tokyo."), or the assistant's whole answer.
    """

    prompt: str
    answer: str

    @property
    def is_question(self) -> bool:
        """True if the prompt is a user's turn in a chat."""
        return self.prompt.endswith("?")


def held_out_lines() -> list[Line]:
    """Return all lines."""
    pairs = (line.split(" -> ") for line in FILE.read_text(encoding="utf-8").splitlines())
    return [Line(asked, answer if asked.endswith("?") else f" {answer}") for asked, answer in pairs]
