"""Lesson 6. AnswerReader: its deltas add up to the whole text, however many tokens a step adds."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.engine.answer import AnswerReader
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.sampled import TokenLogprobs
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.pocket import POCKET_DIR
from mini_engine.text.tokenizer import Tokenizer


@cache
def tokenizer():
    return Tokenizer(POCKET_DIR)


def read(token_ids, sizes, stop=()):
    """All deltas of an answer that gains `sizes[i]` tokens in step i and ends with max_tokens.

    Token i's log probability is -i; the prompt's tokens have 0.5 and 0.25, and 2 of them were cached.
    """
    request = Request("answer", [1, 2, 3], SamplingParams(stop=stop))
    request.prompt_logprobs, request.num_cached_tokens = [TokenLogprobs(0.5, []), TokenLogprobs(0.25, [])], 2
    request.logprobs = [TokenLogprobs(-float(i), []) for i in range(len(token_ids))]
    reader, deltas, left = AnswerReader(request, tokenizer()), [], list(token_ids)
    for size in [*sizes, len(left)]:
        request.output_ids += left[:size]
        left = left[size:]
        if not left:
            request.finish_reason = FinishReason.LENGTH
        if reader.has_news:
            deltas.append(reader.next_delta())
        if deltas and deltas[-1].finish_reason is not None:
            break
    return deltas


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("text", ["\ufffd", "so \ufffd it goes", "the end \ufffd", "EN\ufffd", "the EN", "😀 and E"])
def test_the_deltas_add_up_to_the_whole_text_to_its_last_character(text):
    token_ids = tokenizer().encode(text)
    shown = text_of(read(token_ids, [1] * len(token_ids), stop="END"))
    assert shown == text, "at the end, show what was held back; U+FFFD is a character like any other"


def test_an_answer_cut_inside_a_character_ends_in_one_replacement_character():
    cut = tokenizer().encode("😀")[:-1]
    assert text_of(read(cut, [1] * len(cut))) == "\ufffd" == tokenizer().decode(cut)


def test_tokens_after_a_stop_string_in_the_same_step_are_left_out():
    token_ids = tokenizer().encode("a END b")
    *_, last = read(token_ids, [len(token_ids)], stop="END")
    assert (last.text, last.finish_reason) == ("a ", FinishReason.STOP)
    assert len(last.token_ids) < len(token_ids), "tokens after the stop string are not part of the answer"


@given(
    token_ids=st.lists(st.integers(0, 2047), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 4), max_size=20),
)
def test_the_text_does_not_depend_on_how_many_tokens_a_step_adds(token_ids, sizes):
    deltas = read(token_ids, sizes)
    assert text_of(deltas) == tokenizer().decode(token_ids)
    assert [token for delta in deltas for token in delta.token_ids] == token_ids


@given(
    token_ids=st.lists(st.integers(0, 2047), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 4), max_size=20),
    stop=st.sampled_from(["zzz", "e", "o"]),
)
def test_each_token_brings_its_log_probability_and_the_first_delta_what_is_known_of_the_prompt(token_ids, sizes, stop):
    first, *others = deltas = read(token_ids, sizes, stop)
    for delta in deltas:
        assert len(delta.logprobs) == len(delta.token_ids), "one for each token, up to the stop string"
    told = [one.chosen for delta in deltas for one in delta.logprobs]
    assert told == [-float(i) for i in range(len(told))], "in order, each of them once"
    assert [one.chosen for one in first.prompt_logprobs] == [0.5, 0.25] and first.num_cached_tokens == 2
    assert not any(delta.prompt_logprobs or delta.num_cached_tokens for delta in others), "readers add deltas up"
