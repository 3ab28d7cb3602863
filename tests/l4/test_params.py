"""Lesson 4. SamplingParams: accepted values, values refused in one sentence, and when an answer is over."""

import dataclasses
import math

import pytest

from lessons.l4_sampler.row import Row
from mini_engine.base.errors import UserError
from mini_engine.engine.sampling_params import SamplingParams
from tests.support import refused


def test_by_default_it_draws_from_the_models_own_distribution():
    params = SamplingParams()
    assert not params.is_greedy and params.temperature == 1
    assert (params.top_k, params.top_p, params.min_p) == (0, 1, 0), "every filter is off"
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)


def test_temperature_0_is_greedy_as_an_int_and_as_a_float():
    assert SamplingParams(temperature=0).is_greedy and SamplingParams(temperature=0.0).is_greedy


@pytest.mark.parametrize(
    "values",
    [
        *({"temperature": 0}, {"temperature": 1e-6}, {"temperature": 100}, {"top_k": -1}, {"top_k": 10**9}),
        *({"top_p": 0}, {"top_p": 1}, {"min_p": 1}, {"presence_penalty": -2, "frequency_penalty": 2.0}),
        *({"seed": -(2**63)}, {"seed": 0}, {"seed": 2**64 - 1}, {"max_tokens": 1, "min_tokens": 1}),
        *({"logprobs": 0}, {"logprobs": 20}, {"stop_token_ids": [3, 1]}),
    ],
)
def test_the_ends_of_every_range_are_accepted(values):
    SamplingParams(**values)


@pytest.mark.parametrize(
    "given, values",
    [
        ({"temperature": -1}, "-1 0 100"),
        ({"temperature": -1e-9}, "-1e-09 0"),
        ({"temperature": math.nan}, "nan"),
        ({"temperature": math.inf}, "inf"),
        ({"temperature": "0.7"}, "'0.7'"),
        ({"temperature": True}, "True"),
        ({"temperature": False}, "False"),
        ({"top_p": 1.5}, "1.5 0 1"),
        ({"top_p": -0.1}, "-0.1"),
        ({"min_p": 2}, "2 0 1"),
        ({"repetition_penalty": 0}, "0 0.01 100"),
        ({"presence_penalty": 3}, "3 -2 2"),
        ({"frequency_penalty": math.nan}, "nan"),
        ({"top_k": -2}, "-2 -1"),
        ({"top_k": 2.0}, "2.0"),
        ({"max_tokens": 0}, "0 1"),
        ({"max_tokens": None}, "None"),
        ({"max_tokens": 5, "min_tokens": 6}, "6 0 5"),
        ({"seed": -(2**63) - 1}, f"{-(2**63) - 1} {-(2**63)} {2**64 - 1}"),
        ({"seed": 2**64}, "18446744073709551616"),
        ({"logprobs": 21}, "21 0 20"),
        ({"stop_token_ids": [1, -1]}, "-1"),
        ({"stop_token_ids": "stop"}, "'stop'"),
        ({"stop_token_ids": 7}, "7"),
        ({"ignore_eos": "yes"}, "'yes' True False"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output 1 True False"),
    ],
)
def test_an_invalid_value_is_refused_with_its_name_and_what_is_allowed(given, values):
    with refused(UserError, values) as caught:
        SamplingParams(**given)
    assert caught.value.param == [*given][-1]


@pytest.mark.parametrize("temperature", [1e-7, 9.9e-7, 5e-324, -0.0])
def test_a_temperature_that_could_overflow_a_logit_is_greedy(temperature):
    assert SamplingParams(temperature=temperature) == SamplingParams(temperature=0)


def test_minus_one_turns_top_k_off():
    assert SamplingParams(top_k=-1) == SamplingParams()


def test_minus_one_is_no_seed_and_other_negative_ones_are_seeds():
    assert SamplingParams(seed=-1) == SamplingParams(), "vLLM's clients ask so for a fresh one"
    least = -(2**63)
    assert [SamplingParams(seed=seed).request_seed() for seed in (-2, least)] == [2**64 - 2, 2**63], "64 bits each"


def test_params_are_frozen_and_can_be_compared():
    params = SamplingParams(stop_token_ids=[1, 2])
    assert params == SamplingParams(stop_token_ids=(1, 2)) and hash(params) == hash(
        SamplingParams(stop_token_ids=(1, 2))
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0


def test_the_models_end_tokens_end_an_answer_unless_they_are_ignored():
    assert SamplingParams(stop_token_ids=[5]).stop_ids([1, 2]) == {1, 2, 5}
    assert SamplingParams(stop_token_ids=[5], ignore_eos=True).stop_ids([1, 2]) == {5}


@pytest.mark.parametrize(
    "output, reason",
    [([], None), ([8], None), ([2], "stop"), ([8, 8, 8], "length"), ([8, 8, 2], "stop")],
)
def test_an_answer_ends_with_a_stop_id_or_at_max_tokens_and_the_stop_id_takes_precedence(output, reason):
    assert SamplingParams(max_tokens=3).finish_reason(output, {2}) == reason


def test_a_stop_id_outside_the_vocabulary_is_refused_before_it_joins_a_batch():
    params = SamplingParams(stop_token_ids=[100])
    params.check_fits(101)
    with refused(UserError, "100 99"):
        params.check_fits(100)


def test_min_tokens_needs_a_token_that_does_not_end_the_answer():
    everything = SamplingParams(min_tokens=1, stop_token_ids=[0, 1])
    everything.check_fits(4, eos_token_ids=[2])
    with refused(UserError, "min_tokens 1 3"):
        everything.check_fits(3, eos_token_ids=[2])


def test_a_request_without_a_seed_gets_its_own_and_keeps_it():
    params = SamplingParams()
    first, second = Row(params, [1]), Row(params, [1])
    assert first.seed != second.seed, "two requests with the same params and no seed would give the same answer"
    assert 0 <= first.seed < 2**64
    assert Row(SamplingParams(seed=7), [1]).seed == 7
