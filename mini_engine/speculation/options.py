"""Lesson 14. The options of speculation."""

from dataclasses import dataclass

from mini_engine.base.values import check_switch, checked_whole

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
        for name, most in (("max_drafts", MAX_DRAFTS), ("min_ngram", self.max_ngram), ("max_rows", None)):
            checked_whole(name, getattr(self, name), 1, most, param="speculate")
        check_switch("use_tree", self.use_tree, param="speculate")

    @classmethod
    def of(cls, speculate: "int | Speculation") -> "Speculation":
        """Return `LLM(speculate=…)` as settings; a number is `max_drafts`."""
        return speculate if isinstance(speculate, Speculation) else cls(speculate)
