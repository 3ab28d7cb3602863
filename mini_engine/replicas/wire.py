"""Lesson 13. What travels between the server and its replicas: jobs, the keys of their blocks, and parts of answers.

Numbers and short texts only, so everything can be pickled. Tokens become text in the replica, since a stop string ends
an answer there.
"""

import hashlib
import json
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mini_engine.engine.answer import TextDelta
from mini_engine.engine.grammar import ANYTHING, Matcher
from mini_engine.engine.request import Request
from mini_engine.engine.sampled import TokenLogprobs
from mini_engine.server.output_forms import OutputForm
from mini_engine.tiers.keys import chain

TOKEN_BYTES = 4


class Part(NamedTuple):
    """What one of a request's answers has gained.

    index: of its job. logprobs: of the delta's tokens. prompt_logprobs: all of them, with the answer's first part.
    num_cached_tokens: tokens of the prompt that the replica found in its cache.
    """

    index: int
    delta: TextDelta
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    num_cached_tokens: int

    @classmethod
    def of(cls, index: int, delta: TextDelta, request: Request, start: int) -> "Part":
        """Build the part for a delta whose tokens are the answer's from number `start` on."""
        logprobs = request.logprobs[start : start + len(delta.token_ids)]
        return cls(index, delta, logprobs, [] if start else request.prompt_logprobs, request.num_cached_tokens)

    def add_to(self, request: Request) -> None:
        """Bring the server's copy of the request up to date."""
        request.output_ids += self.delta.token_ids
        request.logprobs += self.logprobs
        request.prompt_logprobs += self.prompt_logprobs
        request.num_cached_tokens = self.num_cached_tokens


@dataclass(frozen=True)
class FormGrammar:
    """A grammar on its way to a replica, which compiles it: a compiled one cannot be pickled."""

    form: OutputForm

    def matcher(self) -> Matcher:
        """Return a matcher that allows anything: the server does not choose tokens."""
        return ANYTHING


def block_keys(prompt_ids: Sequence[int], namespace: Hashable, block_size: int) -> list[bytes]:
    """Return a key for each whole block of a prompt; it stands for the block's tokens and all before (lesson 12).

    A prompt with numbers that are no token ids has no keys: the replica will refuse it.
    """
    root = hashlib.sha256(json.dumps([type(namespace).__name__, namespace]).encode()).digest()
    try:
        tokens = array("I", prompt_ids).tobytes()
    except (OverflowError, TypeError):
        return []
    return list(chain(root, tokens, TOKEN_BYTES * block_size))
