"""Lesson 13. Messages between the server and its replicas: jobs with the keys of their blocks out, deltas back.

Numbers and short texts only, so everything can be pickled. Tokens become text in the replica, since a stop string ends
an answer there. A compiled grammar cannot be pickled, so its form is sent.
"""

import hashlib
import json
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from mini_engine.engine.grammar import ANYTHING, Matcher
from mini_engine.grammars.output_forms import OutputForm
from mini_engine.tiers.keys import chain

TOKEN_BYTES = 4


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


def block_keys(prompt_ids: Sequence[int], namespace: Hashable, block_size: int) -> list[bytes]:
    """Return a key for each whole block of a prompt; it stands for the block's tokens and all before them (lesson 12).

    A prompt with invalid token ids has no keys: the replica will refuse it.
    """
    root = hashlib.sha256(json.dumps([type(namespace).__name__, namespace]).encode()).digest()
    try:
        tokens = array("I", prompt_ids).tobytes()
    except (OverflowError, TypeError):
        return []
    return list(chain(root, tokens, TOKEN_BYTES * block_size))
