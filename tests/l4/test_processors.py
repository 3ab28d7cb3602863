"""Lesson 4. Processed logits equal those of transformers' processors, row by row and to within rounding."""

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from lessons.l4_sampler.row import Row
from mini_engine.engine import processors
from mini_engine.engine.sampler import draw_tokens, uniform
from mini_engine.engine.sampling_params import SamplingParams

NEVER = float("-inf")
ROUNDING = 1e-6  # x * p and x / (1 / p) in float32 differ by up to 1.2e-7 of the value


def row(prompt=(1,), output=(), stop_ids=(), **params):
    return Row(SamplingParams(**params), list(prompt), list(output), stop_ids)


def logs(*probabilities):
    """Return logits whose softmax gives these rows of probabilities."""
    return torch.tensor(probabilities).log()


def kept(logits):
    """Return the ids that can still be chosen, row by row."""
    return [(one > NEVER).nonzero()[:, 0].tolist() for one in logits]


def some_logits(seed, rows, vocab, step):
    """Return random logits. With a coarse `step` many of them tie."""
    logits = 4 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return (logits / step).round() * step if step else logits


def check_against(process, logits, rows, theirs):
    """Compare `process` on all rows at once with `theirs(row)` on each alone: tokens removed and values kept."""
    expected = [
        theirs(one)(torch.tensor([[*one.prompt_ids, *one.output_ids]]), logits[i : i + 1].clone())
        for i, one in enumerate(rows)
    ]
    process(logits, rows)
    for i, want in enumerate(expected):
        asks = {name: value for name, value in vars(rows[i].params).items() if value != getattr(SamplingParams(), name)}
        assert kept(logits[i : i + 1]) == kept(want), (
            f"row {i}, {asks}: not the same tokens are left as in transformers"
        )
        assert torch.allclose(logits[i], want[0], rtol=ROUNDING, atol=0), (
            f"row {i}, {asks}: a value differs from transformers' by more than rounding"
        )


@pytest.mark.task(1)
def test_repetition_penalty_lowers_positive_and_negative_logits():
    logits = torch.tensor([[2.0, -2.0, 0.0, 2.0, -2.0]])
    processors.penalise_repetition(logits, [row([0, 1, 2], repetition_penalty=2)])
    assert float(logits[0, 0]) == 1, (
        f"logit 2, of a prompt token, became {logits[0, 0]:g}: a positive logit is divided by the penalty"
    )
    assert float(logits[0, 1]) == -4, (
        f"logit -2 became {logits[0, 1]:g}: a negative logit is multiplied; divided, the token is likelier"
    )
    assert logits[0, 2:].tolist() == [0, 2, -2], "unseen tokens, and a logit of 0, keep their values"


@pytest.mark.task(1)
def test_repetition_penalty_counts_the_prompt_and_the_answer_and_each_token_once():
    logits = torch.full((1, 5), 8.0)
    processors.penalise_repetition(logits, [row([0, 0, 1], [1, 2, 2, 2], repetition_penalty=2)])
    assert logits[0].tolist() == [4, 4, 4, 8, 8], (
        "a token counts as seen in the prompt or the answer, and once however often it occurs"
    )


@pytest.mark.task(1)
def test_a_token_counts_as_seen_however_long_ago_it_was():
    logits = torch.full((1, 4), 8.0)
    long = [row([0] + [1] * 20_000, [2] + [1] * 20_000, repetition_penalty=2)]
    processors.penalise_repetition(logits, long)
    assert float(logits[0, 0]) == 4, "token 0 was the first of a long prompt: all of the prompt counts, not its end"
    assert float(logits[0, 2]) == 4, "token 2 was the first of a long answer: all of the answer counts, not its end"
    assert logits[0].tolist() == [4, 4, 4, 8], "tokens 0, 1 and 2 were seen, and token 3 was not"


@pytest.mark.task(1)
def test_each_row_is_penalised_for_its_own_history_only():
    logits = torch.full((3, 6), 8.0)
    rows = [row([0], repetition_penalty=2), row([1, 2, 3], repetition_penalty=4), row([5], [4], repetition_penalty=8)]
    processors.penalise_repetition(logits, rows)
    expected = [[4, 8, 8, 8, 8, 8], [8, 2, 2, 2, 8, 8], [8, 8, 8, 8, 1, 1]]
    assert logits.tolist() == expected, "rows see {0}, {1, 2, 3} and {4, 5} with penalties 2, 4 and 8: each its own"


@pytest.mark.task(1)
@pytest.mark.parametrize("penalty", [{"repetition_penalty": 2}, {"presence_penalty": 1}, {"frequency_penalty": 1}])
def test_no_pad_id_is_penalised_when_histories_differ_in_length(penalty):
    logits = torch.full((2, 6), 8.0)
    rows = [row([5], [5], **penalty), row([4], [1, 2, 3, 4], **penalty)]
    change = processors.penalise_repetition if "repetition_penalty" in penalty else processors.penalise_output
    change(logits, rows)
    untouched = (logits[0, :5] == 8).all()
    assert untouched, (
        f"the first row has seen only token 5, but its logits are {logits[0].tolist()}: was a pad counted?"
    )


@pytest.mark.task(1)
def test_a_removed_token_stays_removed_by_a_penalty():
    logits = torch.tensor([[NEVER, 1.0]])
    processors.penalise_repetition(logits, [row([0], repetition_penalty=2)])
    assert logits.tolist() == [[NEVER, 1]], "a token that cannot be chosen has minus infinity and keeps it"


def test_an_empty_history_changes_nothing():
    logits = torch.full((2, 3), 8.0)
    processors.penalise_output(logits, [row([1], [], presence_penalty=1), row([1], [2], presence_penalty=1)])
    assert logits.tolist() == [[8, 8, 8], [8, 8, 7]]


def test_the_output_penalties_count_all_of_a_long_answer():
    logits = torch.full((2, 3), 8.0)
    said = [0] + [1] * 20_000
    processors.penalise_output(logits, [row([2], said, presence_penalty=2), row([2], said, frequency_penalty=2**-6)])
    assert logits[0].tolist() == [6, 6, 8]
    assert logits[1].tolist() == [8 - 2**-6, 8 - 20_000 * 2**-6, 8]


def test_presence_counts_once_frequency_each_time_and_the_prompt_not_at_all():
    logits = torch.full((3, 4), 8.0)
    seen = ([0, 0, 0], [1, 2, 2, 2])
    rows = [row(*seen, presence_penalty=2), row(*seen, frequency_penalty=0.5), row(*seen, presence_penalty=-1)]
    processors.penalise_output(logits, rows)
    assert logits[:, 0].tolist() == [8, 8, 8], (
        "token 0 is in the prompt only: these two penalties count the answer, as OpenAI's do"
    )
    assert logits[0, 1:].tolist() == [6, 6, 8], "presence is subtracted once, however often the token occurs"
    assert logits[1, 1:].tolist() == [7.5, 6.5, 8], "frequency is subtracted once for each occurrence"
    assert logits[2, 1:].tolist() == [9, 9, 8], "a negative penalty makes tokens of the answer likelier"


@pytest.mark.task(2)
def test_stop_ids_are_held_back_until_the_answer_has_min_tokens():
    rows = [row(output=[3] * done, stop_ids={1, 2}, min_tokens=2) for done in (0, 1, 2, 3)]
    logits = torch.zeros(4, 4)
    processors.apply_min_tokens(logits, rows)
    assert kept(logits[:2]) == [[0, 3], [0, 3]], "with 0 or 1 of 2 tokens, no stop id may be chosen yet"
    assert kept(logits[2:]) == [[0, 1, 2, 3]] * 2, "after 2 tokens the answer may end: token 3 may be a stop id"


@pytest.mark.task(2)
def test_an_end_token_cannot_come_first_when_min_tokens_is_1():
    logits = torch.tensor([[0.0, 9.0], [0.0, 9.0]])
    processors.apply_min_tokens(logits, [row((), stop_ids={1}, min_tokens=least) for least in (1, 2)])
    why = "the answers are empty and min_tokens is 1 and 2: stop id 1 is held back in both rows"
    if kept(logits) == [[0, 1], [0]]:
        why = "min_tokens is 1 and the answer is empty: the end token was let through"
    assert kept(logits) == [[0], [0]], why


@pytest.mark.task(2)
def test_each_row_holds_back_its_own_stop_ids():
    logits = torch.zeros(3, 4)
    processors.apply_min_tokens(logits, [row(stop_ids={0}, min_tokens=1), row(stop_ids={2, 3}, min_tokens=1), row()])
    assert kept(logits) == [[1, 2, 3], [0, 1], [0, 1, 2, 3]], (
        "rows hold back {0}, {2, 3} and nothing: each its own stop ids, and none without min_tokens"
    )


@pytest.mark.task(2)
def test_the_prompt_does_not_count_towards_min_tokens():
    logits = torch.zeros(1, 3)
    processors.apply_min_tokens(logits, [row([0] * 9, [0], stop_ids={1}, min_tokens=2)])
    assert kept(logits) == [[0, 2]], "the answer has 1 token of 2, however long the prompt is; stop id 1 must wait"


@pytest.mark.task(2)
def test_other_logits_keep_their_values_while_stop_ids_are_held_back():
    logits = torch.tensor([[3.0, 2.0, -1.0]])
    processors.apply_min_tokens(logits, [row(stop_ids={1}, min_tokens=1)])
    assert logits.tolist() == [[3, NEVER, -1]], "only the stop id becomes NEVER, minus infinity"


@pytest.mark.task(3)
def test_top_p_keeps_the_token_that_crosses_the_threshold():
    logits = logs([0.15, 0.5, 0.05, 0.3])
    processors.keep_top_p(logits, [row(top_p=0.9)])
    why = "of 0.15, 0.5, 0.05 and 0.3, the best that reach top_p = 0.9 are 0.5, 0.3 and 0.15: tokens 0, 1 and 3"
    if kept(logits) == [[1, 3]]:
        why = "0.5 and 0.3 alone do not reach top_p = 0.9, so the 0.15 that crosses it stays"
    assert kept(logits) == [[0, 1, 3]], why


@pytest.mark.task(3)
def test_top_p_keeps_as_few_tokens_as_each_row_needs():
    logits = logs(*[[0.5, 0.3, 0.15, 0.05]] * 4)
    processors.keep_top_p(logits, [row(top_p=p) for p in (0.4, 0.6, 0.9, 0.99)])
    assert kept(logits) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]], "each row has its own top_p"


@pytest.mark.task(3)
def test_top_p_0_keeps_the_best_token():
    logits = logs([0.2, 0.5, 0.3])
    processors.keep_top_p(logits, [row(top_p=0)])
    assert kept(logits) == [[1]], "top_p = 0 must keep the best token, or there is nothing to choose from"


@pytest.mark.task(3)
def test_top_p_1_keeps_every_token_that_can_be_drawn():
    logits = logs([0.2, 0.5, 0.3])
    processors.keep_top_p(logits, [row(top_p=1)])
    assert kept(logits) == [[0, 1, 2]], "top_p = 1 is off: every token can be drawn"


@pytest.mark.task(3)
def test_top_p_leaves_kept_logits_unchanged():
    logits = logs([0.5, 0.3, 0.2])
    processors.keep_top_p(logits, [row(top_p=0.6)])
    assert torch.equal(logits[0, :2], logs([0.5, 0.3])[0]), "kept logits keep their values; softmax rescales them later"


@pytest.mark.task(3)
def test_top_p_counts_only_what_earlier_steps_kept():
    logits = torch.cat([logs([0.2, 0.15, 0.12]), torch.full((1, 3), NEVER)], dim=1)
    processors.keep_top_p(logits, [row(top_p=0.6)])
    assert kept(logits) == [[0, 1]], "three tokens remain, and the probabilities are those among them: they add up to 1"


@pytest.mark.task(3)
def test_a_set_that_reaches_top_p_exactly_is_enough():
    logits = torch.zeros(1, 4)
    processors.keep_top_p(logits, [row(top_p=0.5)])
    assert [len(ids) for ids in kept(logits)] == [2], "two of four equally likely tokens add up to 0.5 and reach it"


@pytest.mark.task(3)
def test_top_p_keeps_no_more_tokens_where_some_tie():
    logits = torch.zeros(1, 5)
    processors.keep_top_p(logits, [row(top_p=0.5)])
    assert [len(ids) for ids in kept(logits)] == [3], (
        "three of five equally likely tokens reach 0.5, whichever they are; the smallest set has no fourth"
    )


def test_the_worked_example_on_the_page():
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0, -1.0]])
    one = [row([0], [2], repetition_penalty=2, temperature=0.5, top_k=4, top_p=0.9, seed=7)]
    processors.penalise_repetition(logits, one)
    assert logits[0].tolist() == [2, 3, 1, 1, 0, -1]
    processors.divide_by_temperature(logits, one)
    assert logits[0].tolist() == [4, 6, 2, 2, 0, -2]
    processors.keep_top_k(logits, one)
    assert kept(logits) == [[0, 1, 2, 3]]
    processors.keep_top_p(logits, one)
    assert kept(logits) == [[0, 1]]
    assert [round(p, 3) for p in logits.softmax(-1)[0].tolist()] == [0.119, 0.881, 0, 0, 0, 0]
    assert round(uniform(7, 2), 3) == 0.244 and draw_tokens(logits, one).tolist() == [1]


# Whole families of inputs, behind the tests that name one mistake each. A seed is not worth shrinking.
seeds = st.integers(0, 10_000)
vocabs = st.sampled_from([3, 17, 200])
steps = st.sampled_from([0, 0, 0.5, 4])
fractions = st.floats(0, 1)
histories = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@pytest.mark.task(1)
@settings(max_examples=20, phases=[Phase.generate])
@given(seeds, vocabs, steps, st.lists(st.tuples(st.floats(0.01, 100), histories, histories), min_size=1, max_size=4))
def test_repetition_penalty_equals_transformers(seed, vocab, step, asked):
    from transformers import RepetitionPenaltyLogitsProcessor

    rows = [row(prompt, output, repetition_penalty=penalty) for penalty, prompt, output in asked]
    logits = some_logits(seed, len(rows), vocab, step)
    check_against(
        processors.penalise_repetition,
        logits,
        rows,
        lambda one: RepetitionPenaltyLogitsProcessor(float(one.params.repetition_penalty)),
    )


@pytest.mark.task(2)
@settings(max_examples=15, phases=[Phase.generate])
@given(seeds, vocabs, st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=4))
def test_min_tokens_equals_transformers(seed, vocab, asked):
    from transformers import MinNewTokensLengthLogitsProcessor

    rows = [row([1, 2], [0] * done, stop_ids=(0, 2), min_tokens=least) for least, done in asked]
    check_against(
        processors.apply_min_tokens,
        some_logits(seed, len(rows), vocab, 0),
        rows,
        lambda one: MinNewTokensLengthLogitsProcessor(2, one.params.min_tokens, [0, 2]),
    )


ROUNDING = 1e-5  # what a float32 sum over 200 probabilities may be off by


@pytest.mark.task(3)
@settings(max_examples=30, phases=[Phase.generate])
@given(seeds, vocabs, steps, st.lists(fractions, min_size=1, max_size=4))
def test_top_p_keeps_the_smallest_set_that_reaches_it(seed, vocab, step, asked):
    before = some_logits(seed, len(asked), vocab, step)
    logits = before.clone()
    processors.keep_top_p(logits, [row(top_p=value) for value in asked])
    for old, new, top_p in zip(before, logits, asked, strict=True):
        left, probs = new > NEVER, old.double().softmax(-1)
        assert left.any(), f"top_p {top_p}: no token is left of {old.tolist()}"
        assert torch.equal(new[left], old[left]), "kept logits keep their values; softmax rescales them later"
        mass, worst = float(probs[left].sum()), float(probs[left].min())
        assert not (probs[~left] > worst).any(), f"top_p {top_p}: a token was removed, and a less likely one kept"
        assert mass >= top_p - ROUNDING, f"top_p {top_p}: the kept tokens add up to {mass:.6f} only"
        assert left.sum() == 1 or mass - worst < top_p + ROUNDING, (
            f"top_p {top_p}: without the worst of the kept tokens they still add up to {mass - worst:.6f}"
        )


@pytest.mark.task(3)
@settings(max_examples=30, phases=[Phase.generate])
@given(seeds, vocabs, st.lists(fractions, min_size=1, max_size=4))
def test_top_p_equals_transformers(seed, vocab, asked):
    """Without ties; a sum that lies within rounding of top_p is left out."""
    from transformers import TopPLogitsWarper

    rows = [row(top_p=value) for value in asked]
    logits = some_logits(seed, len(rows), vocab, 0)
    sums = logits.double().softmax(-1).sort(descending=True).values.cumsum(-1)
    near = (sums - torch.tensor(asked, dtype=torch.float64)[:, None]).abs().amin(-1) < ROUNDING
    assume(not near.any())
    check_against(processors.keep_top_p, logits, rows, lambda one: TopPLogitsWarper(one.params.top_p))


FILTERS = {  # name of the parameter: (the step, transformers' class, values)
    "temperature": (processors.divide_by_temperature, "TemperatureLogitsWarper", st.floats(1e-6, 100)),
    "top_k": (processors.keep_top_k, "TopKLogitsWarper", st.integers(1, 300)),
    "min_p": (processors.keep_min_p, "MinPLogitsWarper", fractions),
}


@pytest.mark.parametrize("name", FILTERS)
@settings(max_examples=20, phases=[Phase.generate])
@given(seeds, vocabs, steps, st.data())
def test_a_filter_equals_transformers(name, seed, vocab, step, data):
    import transformers

    change, theirs, values = FILTERS[name]
    rows = [row(**{name: value}) for value in data.draw(st.lists(values, min_size=1, max_size=4))]
    logits = some_logits(seed, len(rows), vocab, step)
    check_against(change, logits, rows, lambda one: getattr(transformers, theirs)(getattr(one.params, name)))
