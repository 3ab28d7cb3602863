"""Lesson 4. Draws: a number from seed and position alone, and the token whose interval contains it."""

import pytest
import torch

from lessons.l4_sampler.row import Row
from mini_engine.engine import sampler
from mini_engine.engine.sampler import draw, draw_tokens, process, sample, uniform
from mini_engine.engine.sampling_params import SamplingParams


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.task(4)
def test_the_number_is_the_documented_one_on_every_machine():
    assert uniform(0, 0) == 0.0564663990004608, (
        "seed 0 at position 0: blake2b with a digest of 8 bytes, of 16 zero bytes; the first 53 of its 64 bits"
    )
    assert uniform(1, 2) == 0.6434025071674214, "seed and position are 8 little-endian bytes each"
    assert uniform(2**64 - 1, 5) == 0.9318107580365629, "a seed may have 64 bits"
    assert uniform(3, 0) == 0.510422159228949, "the 53rd bit counts as well"


@pytest.mark.task(4)
def test_the_number_depends_on_seed_and_position_and_nothing_else():
    assert uniform(7, 3) == uniform(7, 3), "the same seed and position gave two numbers: is there state somewhere?"
    before = uniform(7, 3)
    uniform(8, 3), uniform(7, 4), torch.manual_seed(0)
    assert uniform(7, 3) == before, "a draw in between changed the number"
    grid = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(grid) == 2500, f"{len(grid)} numbers for 2,500 seeds and positions: some of them share a number"


@pytest.mark.task(4)
@pytest.mark.parametrize("far", [2**8, 2**16, 2**32])
def test_no_number_comes_back_at_a_far_position_or_seed(far):
    assert uniform(3, 1 + far) != uniform(3, 1), f"positions 1 and {1 + far} share a number: answers would repeat"
    assert uniform(3 + far, 1) != uniform(3, 1), f"seeds 3 and {3 + far} share a number: a seed has 64 bits"


@pytest.mark.task(4)
def test_seed_and_position_cannot_be_exchanged():
    assert uniform(1, 2) != uniform(2, 1), "seed 1 at position 2 and seed 2 at position 1 are two different draws"


@pytest.mark.task(4)
def test_numbers_spread_evenly_from_0_to_1():
    values = numbers(*[uniform(seed, position) for seed in range(100) for position in range(100)])
    assert values.min() >= 0 and values.max() < 1, f"{values.min()} … {values.max()}: numbers lie in [0, 1)"
    tenths = torch.histc(values, bins=10, min=0, max=1)
    chi_square = float(((tenths - 1000) ** 2 / 1000).sum())
    assert chi_square < 30, (
        f"10,000 numbers spread over ten equal bins as {tenths.tolist()}; expected about 1,000 in each"
    )


@pytest.mark.task(4)
def test_numbers_of_neighbouring_positions_are_uncorrelated():
    values = numbers(*[uniform(3, position) for position in range(4000)])
    correlation = float(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1])
    assert abs(correlation) < 0.05, f"a number predicts the next one: correlation {correlation:.3f}"


@pytest.mark.task(5)
def test_the_token_is_the_one_whose_interval_contains_the_number():
    probs = torch.tensor([[0.5, 0.25, 0.25]]).repeat(5, 1)
    tokens = draw(probs, numbers(0.0, 0.49, 0.5, 0.74, 0.999))
    assert tokens.tolist() == [0, 0, 1, 1, 2], "0 … 0.5 is token 0, 0.5 … 0.75 token 1, 0.75 … 1 token 2"
    assert tokens.dtype == torch.int64, "token ids are int64"
    assert tokens.shape == (5,), "one token for each row: [R]"


@pytest.mark.task(5)
def test_each_row_is_drawn_with_its_own_number():
    probs = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    assert draw(probs, numbers(0.5, 0.5)).tolist() == [0, 1], "each row has its own probabilities"
    assert draw(probs, numbers(0.95, 0.05)).tolist() == [1, 0], "each row is drawn with its own number"


@pytest.mark.task(5)
def test_a_token_of_probability_0_is_never_drawn():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(4, 1)
    tokens = draw(probs, numbers(0.0, 0.5, 1 - 2.0**-53, 0.25))
    assert set(tokens.tolist()) <= {1, 3}, (
        f"{tokens.tolist()}: a number on a boundary belongs to the interval that begins there"
    )


@pytest.mark.task(5)
def test_the_numbers_are_scaled_to_what_a_row_adds_up_to():
    probs = torch.tensor([[0.4, 0.4]])
    assert draw(probs, numbers(0.45)).tolist() == [0], (
        "the line is 0.8 long: 0.45 of it is 0.36, in the first interval; unscaled, the last token gets too much"
    )


@pytest.mark.task(5)
def test_drawing_leaves_the_probabilities_as_they_were():
    probs, uniforms = torch.tensor([[0.5, 0.5], [0.2, 0.8]]), numbers(0.1, 0.9)
    draw(probs, uniforms)
    assert probs.tolist() == torch.tensor([[0.5, 0.5], [0.2, 0.8]]).tolist(), "draw changed `probs`"
    assert uniforms.tolist() == [0.1, 0.9], "draw changed `uniforms`"


@pytest.mark.task(5)
def test_a_row_that_adds_up_to_a_little_less_than_1_is_drawn_within_its_vocabulary():
    probs = torch.tensor([[0.3, 0.3, 0.3999]])
    assert draw(probs, numbers(1 - 2.0**-53)).tolist() == [2], (
        "the line ends where the probabilities end, which may be below 1"
    )


@pytest.mark.task(5)
def test_a_rare_token_after_a_likely_one_keeps_its_interval():
    probs = torch.tensor([[1.0] + [1e-10] * 1000])
    token = int(draw(probs, numbers(1 - 5e-8)))
    assert 490 < token < 510, f"token {token}, not 500: in float32, 1 + 1e-10 is 1, so rare tokens have empty intervals"


def row(seed, prompt=(1, 2), output=(), **params):
    return Row(SamplingParams(seed=seed, **params), list(prompt), list(output))


def test_a_draw_takes_its_position_from_prompt_and_answer_together(monkeypatch):
    asked = []
    monkeypatch.setattr(sampler, "uniform", lambda *place: asked.append(place) or 0.5)
    monkeypatch.setattr(sampler, "draw", lambda probs, uniforms: uniforms.long())
    draw_tokens(torch.zeros(3, 4), [row(7), row(8, output=[3]), row(9, [1], [2, 3])])
    assert asked == [(7, 2), (8, 3), (9, 3)], (
        "expected the seed and the number of tokens so far, prompt and answer together"
    )


def test_an_answer_sent_back_as_part_of_a_prompt_continues_the_same_way():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).repeat(2, 1)
    first, again = draw_tokens(logits, [row(7, [1, 2], [3, 4]), row(7, [1, 2, 3, 4])]).tolist()
    assert first == again, "position 4 drew differently in the answer and in the prompt: count both together"


def test_requests_with_equal_seeds_draw_alike_and_others_do_not():
    logits = torch.zeros(100, 50)
    shared = draw_tokens(logits, [row(42, prompt=[request]) for request in range(100)]).unique()
    own = draw_tokens(logits, [row(request) for request in range(100)]).unique()
    assert len(shared) == 1, "one seed at one position is one number, whatever the prompt says"
    assert len(own) > 30, f"100 seeds drew only {len(own)} of 50 equally likely tokens"


PARAMS = [
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 6},
    {"top_p": 0.8},
    {"min_p": 0.1, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_tokens_are_drawn_in_proportion_to_their_probability(params):
    logits = 2 * torch.randn(1, 12, generator=torch.Generator().manual_seed(5))
    rows = [row(seed, **params) for seed in range(2000)]
    counts = torch.bincount(torch.tensor([one.token_id for one in sample(logits.expand(2000, -1), rows)]), minlength=12)
    expected = 2000 * process(logits.clone(), rows[:1]).softmax(-1)[0]
    assert not counts[expected == 0].any(), "a token that was filtered out was drawn"
    possible = expected > 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_square < 40, (
        f"chi-square {chi_square:.1f} over {int(possible.sum())} tokens: "
        f"drew {counts.tolist()}, expected {expected.tolist()}"
    )


def test_one_seed_draws_in_proportion_to_the_probabilities_over_its_positions():
    logits = torch.tensor([[0.2, 0.3, 0.5]]).log()
    rows = [row(11, prompt=[0] * position) for position in range(1, 4001)]
    counts = torch.bincount(draw_tokens(logits.expand(4000, -1), rows), minlength=3)
    expected = torch.tensor([800.0, 1200.0, 2000.0])
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 20, f"one seed drew {counts.tolist()} over 4,000 positions; expected about {expected.tolist()}"
