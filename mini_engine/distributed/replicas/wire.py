"""Lesson 13. What travels between the server and its replicas: numbers, short texts, and the forms of grammars.

So everything can be pickled. Tokens become text in the replica, since a stop string ends an answer there.
"""

from dataclasses import dataclass

from mini_engine.engine.grammar import ANYTHING, Matcher
from mini_engine.grammars.output_forms import OutputForm


@dataclass(frozen=True)
class FormGrammar:
    """A grammar in transit to a replica, which compiles it: a compiled one cannot be pickled.

    Raises:
        UserError: a schema is too large or nested too deeply; pickle itself would fail less clearly.
    """

    form: OutputForm

    def __post_init__(self) -> None:
        self.form.check()

    def matcher(self) -> Matcher:
        """Return a matcher that allows anything: the server does not choose tokens."""
        return ANYTHING
