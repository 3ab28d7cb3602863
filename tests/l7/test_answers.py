"""Lesson 7. Answers in their shapes, whole and streamed."""

import asyncio
import json

import pytest

from mini_engine.engine.answer import TextDelta
from mini_engine.engine.jobs import Job
from mini_engine.engine.request import FinishReason
from mini_engine.engine.sampled import TokenLogprobs
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.server.chat_protocol import ChatRequest
from mini_engine.server.errors import ApiError
from mini_engine.server.protocol import CompletionRequest
from mini_engine.server.reply import Reply
from mini_engine.server.reply_formats import ChatFormat, CompletionFormat
from tests.shared.service import flat, tokenizer

PARIS, DOT = tokenizer().encode(" Paris.")


# Forms


class Fixed:
    """Answers that are there already: deltas of one or several jobs."""

    def __init__(self, jobs, deltas):
        self.jobs, self.deltas, self.closed = jobs, deltas, 0
        self.tokenizer = tokenizer()

    async def __aiter__(self):
        for item in self.deltas:
            yield item

    def close(self):
        self.closed += 1


TWO = [(0, TextDelta("Pa", [PARIS])), (0, TextDelta("ris", [DOT], FinishReason.LENGTH))]


def scored(delta: TextDelta) -> TextDelta:
    return delta._replace(logprobs=tuple(TokenLogprobs(-0.5, [(id, -0.5), (9, -1.5)]) for id in delta.token_ids))


def reply(form, model, body, deltas=TWO, logprobs=None):
    if logprobs is not None:
        deltas = [(index, scored(delta)) for index, delta in deltas]
    answers = Fixed([Job([1, 2], SamplingParams(logprobs=logprobs))], deltas)
    return Reply(form, model.model_validate(body), "tiny", answers), answers


def whole(*args, **more):
    return json.loads(asyncio.run(reply(*args, **more)[0].whole()))


def chunks(*args, **more):
    async def read():
        made, answers = reply(*args, **more)
        found = [json.loads(chunk) async for chunk in made.chunks()]
        assert answers.closed, "answers are closed when they have been read"
        return found

    return asyncio.run(read())


CHAT = {"messages": [{"role": "user", "content": "x"}]}


def test_a_whole_completion():
    found = whole(CompletionFormat, CompletionRequest, {"prompt": "x", "return_token_ids": True})
    assert found["object"] == "text_completion" and found["id"].startswith("cmpl-") and found["model"] == "tiny"
    expected = {"text": "Paris", "logprobs": None, "token_ids": [PARIS, DOT], "finish_reason": "length"}
    assert found["choices"] == [{"index": 0} | expected]
    assert found["usage"]["completion_tokens"] == 2


def test_a_whole_chat():
    found = whole(ChatFormat, ChatRequest, CHAT)
    assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-")
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "Paris"}
    assert "token_ids" not in found["choices"][0], "only for those who ask"


def test_a_streamed_completion_ends_with_its_usage_where_it_was_asked_for():
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = chunks(CompletionFormat, CompletionRequest, body)
    assert [piece["choices"][0]["text"] for piece in pieces] == ["Pa", "ris"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None, "length"]
    assert all(piece["usage"] is None for piece in pieces), "every chunk has the key, only the last one the figures"
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2
    assert len({piece["id"] for piece in [*pieces, last]}) == 1


def test_continuous_usage_counts_what_has_been_sent():
    body = {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    found = chunks(CompletionFormat, CompletionRequest, body)
    counts = [piece["usage"]["completion_tokens"] for piece in found]
    assert counts == [1, 2], f"each chunk tells the tokens sent so far, its own included: {counts}"


def test_a_token_that_completes_no_character_is_no_chunk():
    deltas = [(0, TextDelta("", [1])), (0, TextDelta("é", [2])), (0, TextDelta("", [3], FinishReason.STOP))]
    found = chunks(CompletionFormat, CompletionRequest, {"prompt": "x"}, deltas)
    assert [chunk["choices"][0]["text"] for chunk in found] == ["é", ""], "nothing to show is nothing to send"
    found = chunks(CompletionFormat, CompletionRequest, {"prompt": "x", "return_token_ids": True}, deltas)
    assert [chunk["choices"][0]["token_ids"] for chunk in found] == [[1], [2], [3]], "but its id is wanted here"


def test_a_failure_in_mid_stream_is_raised_behind_the_pieces_before_it():
    deltas = [(0, TextDelta("Pa", [PARIS])), (0, TextDelta("", [], FinishReason.ERROR, "lost"))]
    made, answers = reply(CompletionFormat, CompletionRequest, {"prompt": "x"}, deltas)
    found = []

    async def read():
        async for chunk in made.chunks():
            found.append(json.loads(chunk)["choices"][0]["text"])

    with pytest.raises(ApiError, match="lost"):
        asyncio.run(read())
    assert found == ["Pa"] and answers.closed


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_of_a_completion(streamed):
    args = (CompletionFormat, CompletionRequest, {"prompt": "x", "logprobs": 2})
    parts = chunks(*args, logprobs=2) if streamed else [whole(*args, logprobs=2)]
    found = [part["choices"][0]["logprobs"] for part in parts]
    assert flat(part["tokens"] for part in found) == [" Paris", "."]
    assert flat(part["token_logprobs"] for part in found) == [-0.5, -0.5]
    assert flat(part["text_offset"] for part in found) == [0, 6]
    assert all(len(top) == 2 for part in found for top in part["top_logprobs"])


@pytest.mark.parametrize("streamed", [False, True])
def test_each_of_several_answers_has_its_own_logprobs_behind_the_prompt_s(streamed):
    """Their deltas come in any order. The prompt's are those of the first delta, and come once."""
    score = {token: TokenLogprobs(-token / 8, []) for token in (1, 2, 5, 6, 7)}
    deltas = [
        (1, TextDelta("b", [6], None, None, (score[6],), (score[2],), 1)),
        (0, TextDelta("a", [5], FinishReason.STOP, None, (score[5],), (score[2],), 0)),
        (1, TextDelta("c", [7], FinishReason.STOP, None, (score[7],))),
    ]
    answers = Fixed([Job([1, 2], SamplingParams())] * 2, deltas)
    body = {"prompt": [1, 2], "n": 2, "echo": True, "logprobs": 0, "stream_options": {"include_usage": True}}
    made = Reply(CompletionFormat, CompletionRequest.model_validate(body), "tiny", answers)

    async def read():
        return [json.loads(chunk) async for chunk in made.chunks()] if streamed else [json.loads(await made.whole())]

    found = asyncio.run(read())
    for index, tokens in enumerate(([5], [6, 7])):
        parts = [
            one["logprobs"]["token_logprobs"] for part in found for one in part["choices"] if one["index"] == index
        ]
        assert flat(parts) == [None, *(score[token].chosen for token in [2, *tokens])]
    spent = found[-1]["usage"]
    assert (spent["prompt_tokens"], spent["completion_tokens"], spent["prompt_tokens_details"]["cached_tokens"]) == (
        2, 3, 0,
    ), "of a prompt with two answers, the first one's cached tokens count"  # fmt: skip


def test_a_token_that_was_generated_only_to_score_a_prompt_is_neither_shown_nor_counted():
    delta = TextDelta("b", [6], FinishReason.LENGTH, None, (TokenLogprobs(-1.0, []),), (TokenLogprobs(-2.0, []),), 1)
    body = {"prompt": [1, 2], "echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
    found = whole(CompletionFormat, CompletionRequest, body, [(0, delta)])
    (choice,) = found["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0] and choice["token_ids"] == []
    assert choice["text"] == tokenizer().text_of([1, 2]) and found["usage"]["completion_tokens"] == 0


def test_logprobs_of_a_chat_have_bytes():
    found = whole(ChatFormat, ChatRequest, CHAT | {"logprobs": True, "top_logprobs": 2}, logprobs=2)
    first, _ = found["choices"][0]["logprobs"]["content"]
    assert first["token"] == " Paris" and bytes(first["bytes"]) == b" Paris" and len(first["top_logprobs"]) == 2
