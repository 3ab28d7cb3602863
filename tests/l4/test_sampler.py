"""Lesson 4. The whole sampler: rows with different parameters share a batch without affecting one another."""

import math
import random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lessons.l4_sampler.row import Row
from mini_engine.engine import sampler
from mini_engine.engine.sampled import NO_TOKEN
from mini_engine.engine.sampler import choose, process, sample
from mini_engine.engine.sampling_params import SamplingParams
from tests.support import OneOf, refused

NEVER = float("-inf")


def row(prompt=(1,), output=(), stop_ids=(), **params):
    return Row(SamplingParams(**params), list(prompt), list(output), stop_ids)


def some_logits(rows, vocab=40, seed=0):
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


class Operations(TorchDispatchMode):
    """Records the operations torch runs while this is active: name, and shape of the first tensor."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        shape = next((tuple(x.shape) for x in args if isinstance(x, torch.Tensor)), None)
        self.seen.append((function.overloadpacket.__name__, shape))
        return function(*args, **kwargs or {})


@pytest.mark.task(6)
def test_the_tokens_are_one_int64_for_each_row(monkeypatch):
    monkeypatch.setattr(sampler, "draw_tokens", lambda logits, rows: torch.zeros(len(rows), dtype=torch.int64))
    rows = [row(temperature=0), row(seed=1), row(output=[0], temperature=0, presence_penalty=1)]
    token_ids = choose(some_logits(3), rows)
    assert torch.is_tensor(token_ids), f"the next tokens are a tensor [R] int64, got {token_ids!r}"
    assert (list(token_ids.shape), token_ids.dtype) == ([3], torch.int64), "the next tokens are a tensor [R] int64"


@pytest.mark.task(6)
def test_greedy_rows_cost_one_argmax_no_sort_no_softmax_no_copy():
    logits = some_logits(5)
    with Operations() as operations:
        token_ids = choose(logits, [row(seed=1, temperature=0, top_p=0.5, top_k=3, min_p=0.1)] * 5)
    best = logits.argmax(-1).tolist()
    assert token_ids.tolist() == best, "greedy rows take the best token of the model's logits; nothing is drawn"
    names = [name for name, _ in operations.seen]
    assert names == OneOf(["max"], ["argmax"]), (
        f"torch ran {names}: no filter removes the best token, so a greedy row needs none"
    )


@pytest.mark.task(6)
def test_only_rows_that_need_work_are_worked_on(monkeypatch):
    worked_on = []

    def record(logits, rows):
        worked_on.append((logits.clone(), list(rows)))
        return logits

    monkeypatch.setattr(sampler, "process", record)
    monkeypatch.setattr(sampler, "draw_tokens", lambda logits, rows: torch.full((len(rows),), 39))
    logits = some_logits(5)
    rows = [row(temperature=0), row(seed=1), row(temperature=0), row(seed=2, top_p=0.5), row(temperature=0)]
    token_ids = choose(logits, rows).tolist()
    best = logits.argmax(-1).tolist()
    assert token_ids == [best[0], 39, best[2], 39, best[4]], "drawn tokens go to the rows that draw, in order"
    sizes = [len(theirs) for _, theirs in worked_on]
    assert sizes == [2], f"process was given batches of {sizes} rows: the two rows that draw need work, in one call"
    assert worked_on[0][1] == [rows[1], rows[3]], "only the two rows that draw need work"
    assert torch.equal(worked_on[0][0], logits[[1, 3]]), "a request was given the logits of another row"


def test_only_rows_that_ask_for_top_p_are_sorted():
    logits = some_logits(6)
    rows = [row(), row(top_p=0.5), row(temperature=0.5), row(top_p=0.9), row(), row(top_k=3)]
    with Operations() as operations:
        process(logits, rows)
    sorted_logits = sum(math.prod(shape) for name, shape in operations.seen if name == "sort")
    assert sorted_logits <= 2 * 40, f"{sorted_logits} logits were sorted: two of six rows of 40 ask for top_p"


@pytest.mark.task(6)
def test_a_greedy_row_with_a_penalty_takes_the_best_token_that_the_penalty_leaves():
    logits = torch.tensor([[5.0, 4.5, 1.0], [5.0, 4.5, 1.0]])
    rows = [row(output=[0], temperature=0, presence_penalty=1), row(temperature=0)]
    assert choose(logits, rows).tolist() == [1, 0], "in the first row 5 - 1 is less than 4.5; the second has no penalty"


@pytest.mark.task(6)
@pytest.mark.parametrize(
    "asked",
    [
        dict(prompt=[0], repetition_penalty=2),
        dict(output=[0], presence_penalty=1),
        dict(output=[0], frequency_penalty=1),
        dict(stop_ids={0}, min_tokens=1),
    ],
    ids=["repetition", "presence", "frequency", "min_tokens"],
)
def test_whatever_may_change_the_best_token_of_a_greedy_row_is_applied(monkeypatch, asked):
    monkeypatch.setattr(sampler, "process", lambda logits, rows: -logits)  # as if the worst token became the best
    logits = torch.tensor([[5.0, 4.5, 1.0]])
    assert choose(logits, [row(temperature=0, **asked)]).tolist() == [2], (
        f"{asked} may change which token is best: take the argmax of what `process` returns"
    )


@pytest.mark.task(6)
def test_each_processed_row_keeps_its_place(monkeypatch):
    monkeypatch.setattr(sampler, "draw_tokens", lambda logits, rows: torch.tensor([one.seed for one in rows]))
    logits = torch.tensor([[9.0, 8.5, 1.0, 0.0]] * 6)
    logits[4] = torch.tensor([0.0, 1.0, 8.5, 9.0])
    greedy, penalised = row(temperature=0), row(output=[0], temperature=0, presence_penalty=1)
    rows = [row(seed=30), penalised, greedy, row(seed=31), penalised, row(seed=32)]
    assert choose(logits, rows).tolist() == [30, 1, 0, 31, 3, 32], (
        "drawn, penalised and plain greedy rows in one batch: each token goes to the row it was chosen for"
    )


@pytest.mark.task(6)
def test_a_greedy_row_in_a_mixed_batch_is_not_divided_by_its_temperature_of_0(monkeypatch):
    monkeypatch.setattr(sampler, "draw_tokens", lambda logits, rows: torch.zeros(len(rows), dtype=torch.int64))
    logits = torch.tensor([[-5.0, 3.0, 4.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    rows = [row(output=[0], temperature=0, presence_penalty=1), row(temperature=2), row(temperature=0)]
    token_ids = choose(logits, rows).tolist()
    why = "the greedy rows take their best token, 2, and the one that draws the token drawn for it, 0"
    if token_ids[0] == 1:
        why = "3 / 0 and 4 / 0 are both inf, so dividing by 0 loses the best token of the first row"
    assert token_ids == [2, 0, 2], why


@pytest.mark.task(6)
def test_choosing_leaves_the_logits_unchanged(monkeypatch):
    monkeypatch.setattr(sampler, "draw_tokens", lambda logits, rows: torch.zeros(len(rows), dtype=torch.int64))
    logits = some_logits(3)
    before = logits.clone()
    choose(logits, [row(output=[2], presence_penalty=1, temperature=0.5, top_k=2)] * 3)
    assert torch.equal(logits, before), "the model's logits were changed, and logprobs are read from them next"


@pytest.mark.task(6)
def test_half_precision_logits_are_processed_in_float32(monkeypatch):
    seen = []
    monkeypatch.setattr(sampler, "draw_tokens", lambda logits, rows: seen.append(logits.dtype) or torch.zeros(1).long())
    choose(some_logits(1).bfloat16(), [row(temperature=0.7)])
    assert seen == [torch.float32], "transformers processes logits in float32, whatever the model's dtype"


def test_a_row_is_penalised_for_its_own_history_when_only_some_rows_have_a_penalty():
    logits = torch.full((3, 4), 8.0)
    rows = [row(output=[0]), row(output=[1], presence_penalty=1), row(output=[2], presence_penalty=2)]
    process(logits, rows)
    expected = [[8, 8, 8, 8], [8, 7, 8, 8], [8, 8, 6, 8]]
    assert logits.tolist() == expected, "a row was penalised for the history of another row, or no row was"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (dict(min_tokens=1), [8, 8, NEVER, 8]),
        (dict(output=[1, 1], frequency_penalty=1), [8, 6, 8, 8]),
        (dict(output=[1, 1], presence_penalty=1), [8, 7, 8, 8]),
        (dict(prompt=[1], repetition_penalty=2), [8, 4, 8, 8]),
    ],
    ids=str,
)
def test_a_step_runs_when_it_is_the_only_one_asked_for(asked, expected):
    assert process(torch.full((1, 4), 8.0), [row(stop_ids={2}, **asked)]).tolist() == [expected]


def test_temperature_is_applied_before_top_p():
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log()
    process(logits, [row(temperature=0.5, top_p=0.7)])
    left = (logits[0] > NEVER).tolist()
    assert left == [True, False, False], (
        "at temperature 0.5 the best token has 0.78: top-p 0.7 was applied before the temperature"
    )


# What a request may ask for, in any mixture.
ASKED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.5, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 5, 1000]),
        "top_p": st.sampled_from([0, 0.5, 0.9, 1]),
        "min_p": st.sampled_from([0, 0.05]),
        "repetition_penalty": st.sampled_from([1, 1.3]),
        "presence_penalty": st.sampled_from([0, 0.5]),
        "frequency_penalty": st.sampled_from([0, 0.2]),
        "min_tokens": st.integers(0, 4),
        "logprobs": st.sampled_from([None, 0, 3]),
        "seed": st.integers(0, 2**64 - 1),
    }
)
HISTORY = st.lists(st.integers(0, 39), max_size=5)


@settings(max_examples=25, phases=[Phase.generate])
@given(st.lists(st.tuples(ASKED, HISTORY, HISTORY), min_size=1, max_size=6), st.integers(0, 1000), st.randoms())
def test_what_a_row_chooses_does_not_depend_on_its_batch(asked, seed, chance: random.Random):
    rows = [row([0, *prompt], output, stop_ids={3, 4}, **params) for params, prompt, output in asked]
    logits = some_logits(len(rows), seed=seed)
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [one])[0] for i, one in enumerate(rows)]
    where = next((i for i, (a, b) in enumerate(zip(together, alone, strict=True)) if a != b), None)
    assert where is None, f"row {where} of {len(rows)} chose {together[where]} in the batch and {alone[where]} alone"
    order = chance.sample(range(len(rows)), len(rows))
    shuffled = sample(logits[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order], "reordering the rows changed a token"


def test_a_seeded_request_draws_the_same_in_every_row_of_a_batch():
    logits = some_logits(1).expand(8, -1)
    token_ids = {one.token_id for one in sample(logits, [row(seed=5)] * 8)}
    assert len(token_ids) == 1, (
        f"one seed, one position, eight rows: {token_ids}; does the draw depend on the row's index?"
    )


@pytest.mark.parametrize("params", [{"top_p": 0}, {"top_k": 1}, {"min_p": 1}], ids=str)
def test_filters_that_keep_only_the_best_token_are_greedy(params):
    logits = some_logits(4)
    rows = [row(seed=seed, temperature=5, **params) for seed in range(4)]
    assert [one.token_id for one in sample(logits, rows)] == logits.argmax(-1).tolist()


def test_logprobs_are_the_models_own_before_temperature_and_filters():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    asked = row(output=[0], temperature=0.1, top_k=1, presence_penalty=1, logprobs=2, seed=1)
    told = sample(logits, [asked])[0].logprobs
    assert told.top == [pytest.approx((0, -0.6931), abs=1e-4), pytest.approx((1, -1.2040), abs=1e-4)]
    assert told.chosen == pytest.approx(-1.2040, abs=1e-4), "token 1 was chosen, and the model gave it log 0.3"


def test_half_precision_logits_are_penalised_and_reported_in_float32():
    logits = torch.tensor([[8.0, 8.0, 0.0]]).bfloat16()
    chosen = sample(logits, [row(output=[0], temperature=0, presence_penalty=0.01, logprobs=1)])[0]
    assert chosen.token_id == 1, "8 - 0.01 is less than 8, but bfloat16 rounds it back to 8"
    assert chosen.logprobs.chosen == float(logits.float().log_softmax(-1)[0, 1])


def test_logprobs_are_reported_only_on_request():
    told = [one.logprobs for one in sample(some_logits(3), [row(seed=1), row(logprobs=0, seed=1), row(temperature=0)])]
    assert told[0] is None and told[2] is None
    assert told[1].top == [] and told[1].chosen < 0, "0 asks for the chosen token alone"


def test_asking_for_more_logprobs_than_tokens_gives_all_tokens():
    told = sample(some_logits(2, vocab=3), [row(logprobs=20, seed=1), row(logprobs=1, temperature=0)])
    assert len(told[0].logprobs.top) == 3 and len(told[1].logprobs.top) == 1


def test_more_rows_of_logits_than_requests_are_refused():
    with refused(ValueError, "2 1"):
        sample(some_logits(2), [row()])


BROKEN = {
    "one NaN": lambda logits: logits[2:3, 7:8].fill_(math.nan),
    "nothing but NaN": lambda logits: logits[2:3].fill_(math.nan),
    "no token at all": lambda logits: logits[2:3].fill_(NEVER),
    "nothing but infinity": lambda logits: logits[2:3].fill_(math.inf),
    "one infinity": lambda logits: logits[2:3, 7:8].fill_(math.inf),
}


@pytest.mark.parametrize("asked", [{"temperature": 0}, {"temperature": 0, "presence_penalty": 1}, {"top_p": 0.9}])
@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_no_token_is_made_up_for_a_row_without_numbers(damage, asked):
    logits = some_logits(4)
    rows = [row(seed=5), row(temperature=0), row(output=[1], seed=6, **asked), row(seed=7, logprobs=2)]
    expected = sample(logits, rows)
    damage(logits)
    found = sample(logits, rows)
    assert found[:2] + found[3:] == expected[:2] + expected[3:], "a broken row has changed another row's token"
    assert found[2].token_id == NO_TOKEN and found[2].error is not None, "row 2 holds no number: whose token is this?"


class Form:
    """A grammar and its matcher: `mask` is called for the row's mask."""

    is_over, may_end, error = False, False, None

    def __init__(self, mask):
        self.mask = mask

    def matcher(self):
        return self


def only(*tokens, size=5):
    """Return a mask of 40 tokens that allows these."""
    return sum(1 << token for token in tokens).to_bytes(size, "little")


FAILING = {
    "raises": lambda: 1 / 0,
    "allows nothing": lambda: only(),
    "is too short": lambda: only(1, size=2),
    "is too long": lambda: only(1, size=7),
    "is of no bytes": lambda: "x",
}


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("mask", FAILING.values(), ids=FAILING)
def test_a_grammar_that_fails_leaves_other_rows_their_tokens(mask, temperature):
    asked = {"temperature": temperature, "seed": 3}
    others = [
        row(grammar=Form(lambda: only(4, 9, 30)), **asked),
        row(**asked),
        row(min_tokens=2, stop_ids={1}, **asked),
    ]
    logits = some_logits(4)
    expected = sample(logits[[0, 2, 3]], others)
    found = sample(logits, [others[0], row(grammar=Form(mask), **asked), *others[1:]])
    assert [found[0], *found[2:]] == expected, "a failing grammar has changed another row's token"
    assert found[1].error is not None or mask() == only(1, size=7), f"a token was made up: {found[1].token_id}"


@pytest.mark.parametrize("temperature", [0, 1])
def test_where_only_stop_ids_fit_the_form_the_form_wins_over_min_tokens(temperature):
    asked = {"temperature": temperature, "seed": 3, "min_tokens": 2, "stop_ids": {4, 9}}
    forms = [row(grammar=Form(lambda mask=mask: mask), **asked) for mask in (only(4, 9), only(4, 9, 11))]
    first, second = sample(some_logits(2), forms)
    assert first.token_id == OneOf(4, 9), f"the form allows nothing but stop ids ({first.error})"
    assert second.token_id == 11, "stop ids are held back as long as another token fits"


@pytest.mark.gpu
def test_a_gpu_draws_the_tokens_that_a_cpu_draws():
    rows = [row(seed=seed, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01) for seed in range(64)]
    logits = some_logits(64, vocab=1000)
    assert sample(logits.cuda(), rows) == sample(logits, rows)
