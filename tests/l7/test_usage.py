"""Lesson 7. An answer's usage and its finish reason."""

import json

import pytest

from mini_engine.engine.answer import TextDelta
from mini_engine.engine.request import FinishReason
from mini_engine.server.errors import ApiError
from mini_engine.server.reply import AnswerTokens, finish_reason, usage
from tests.support import must_raise


def done(prompt_ids, output_ids, cached=0) -> AnswerTokens:
    """An answer that has been read to its end."""
    return AnswerTokens(list(prompt_ids), list(output_ids), cached)


@pytest.mark.task(5)
def test_every_token_of_the_answer_is_counted_the_last_one_too():
    found = usage([done([1, 2, 3], [4, 5, 6, 7])], n=1)
    assert found["completion_tokens"] == 4, (
        f"{found['completion_tokens']} of 4 tokens are counted: "
        "the last token has no KV, but the client got it; count tokens, not their KV"
    )
    assert (found["prompt_tokens"], found["total_tokens"]) == (3, 7), "3 tokens of the prompt and 4 of the answer"


@pytest.mark.task(5)
def test_a_prompt_counts_once_however_many_answers_it_has():
    found = usage([done([1, 2, 3], [4]), done([1, 2, 3], [4, 5]), done([6], [7]), done([6], [7])], n=2)
    assert found["prompt_tokens"] == 4, "two prompts, of 3 and 1 tokens, with n=2 answers each: the prompts count once"
    assert found["completion_tokens"] == 5, "the answers have 1, 2, 1 and 1 tokens, and all of them count"
    assert found["total_tokens"] == 9, "the sum of both"


@pytest.mark.task(5)
def test_cached_tokens_are_told():
    first, second = [done(range(32), [4], cached=k) for k in (16, 31)], [done(range(9), [4], cached=k) for k in (4, 8)]
    found = usage(first + second, n=2)
    assert found["prompt_tokens_details"] == {"cached_tokens": 20}, (
        "16 of the first prompt and 4 of the second, as their first answers found them: an answer that comes later "
        "finds the first one's blocks, and a prompt counts once"
    )
    assert found["prompt_tokens"] == 41, "cached tokens are prompt tokens too"


@pytest.mark.task(5)
@pytest.mark.parametrize(("reason", "word"), [("stop", "stop"), ("length", "length"), (None, None)])
def test_an_answer_that_ended_well_says_why(reason, word):
    found = finish_reason(TextDelta("x", [1], reason and FinishReason(reason)))
    why = "an answer that goes on has no finish_reason yet" if reason is None else "OpenAI's word is the engine's own"
    if reason == "length":
        why = "a client that gets 'stop' for a cut-off answer takes it for a complete one"
    assert found == word, f"the engine's finish_reason is {reason!r}: {why}"
    assert json.dumps({"finish_reason": found}) == json.dumps({"finish_reason": word}), "as JSON it is OpenAI's word"


@pytest.mark.task(5)
@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_an_answer_that_ended_badly_is_an_error_and_no_reason(reason):
    with must_raise(ApiError, "an answer that failed or was aborted is a 500, not one with a finish_reason") as caught:
        finish_reason(TextDelta("", [], reason, "the pool is on fire"))
    assert caught.value.status_code == 500, "OpenAI's clients know no finish_reason for this: say that it failed"
    assert "the pool is on fire" in caught.value.detail, f"the message must say why, delta.error: {caught.value.detail}"
