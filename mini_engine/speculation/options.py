"""Lesson 14. The options of speculation."""

from dataclasses import dataclass

from mini_engine.base.errors import UserError
from mini_engine.base.values import shown

MAX_DRAFTS = 64


@dataclass(frozen=True)
class Speculation:
    """The options of speculation.

    max_drafts: the most tokens guessed for a request in one step, k.
    max_ngram, min_ngram: the most and the fewest of the last tokens to look up, the most first.
    max_rows: the most rows of a step with guesses. Below it a row is nearly free, since a step's time goes into reading
        the weights; with this many requests decoding, nothing is guessed.
    use_tree: also guess that an answer continues like an earlier one with the same beginning (lesson 8's tree).

    Raises:
        UserError: a value is out of range.
    """

    max_drafts: int = 8
    max_ngram: int = 4
    min_ngram: int = 2
    max_rows: int = 16
    use_tree: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_drafts", 1, MAX_DRAFTS),
            ("min_ngram", 1, self.max_ngram),
            ("max_rows", 1, None),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least or (most is not None and value > most):
                span = f"of {least} or more" if most is None else f"from {least} to {most}"
                raise UserError(f"{name} is {shown(value)}; give a whole number {span}", param="speculate")
        if type(self.use_tree) is not bool:
            raise UserError(f"use_tree is {shown(self.use_tree)}; give True or False", param="speculate")

    @classmethod
    def of(cls, speculate: "int | Speculation") -> "Speculation":
        """Return `LLM(speculate=…)` as settings; a number is `max_drafts`."""
        return speculate if isinstance(speculate, Speculation) else cls(speculate)
