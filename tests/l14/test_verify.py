"""Lesson 14. Verification: which tokens stand, and that a distribution stays what it is."""

import itertools
import math
from array import array
from collections import Counter
from copy import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.engine.request import Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampler import sample
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.verify import DraftChunk, num_emitted, sample_rows, with_drafts
from tests.l14.toys import EOS, VOCAB, Always, answers, cycle, engine_of, greedy, plain_engine, request_of

TOKENS = st.lists(st.integers(0, 2), max_size=6)
ANY_LOAD = 2**20


@pytest.mark.task(3)
def test_without_a_right_draft_a_step_still_yields_a_token():
    assert num_emitted([], [5]) == 1, "row 0 has seen no draft, so its token is right whatever was guessed"
    assert num_emitted([7, 8], [5, 8, 9]) == 1, "the second draft was seen after a wrong one"
    assert num_emitted([5, 8], [5, 7, 9]) == 2, (
        "draft 5 is what row 0 chose, so row 1's token stands too; draft 8 is not what row 1 chose"
    )
    assert num_emitted([5, 8], [5, 8, 9]) == 3, "the last row's token is right too: the bonus"


@pytest.mark.task(3)
@given(TOKENS, TOKENS)
def test_the_tokens_up_to_the_first_wrong_draft_stand_and_the_one_chosen_instead(drafts, more):
    chosen = (more + [0] * 7)[: len(drafts) + 1]
    equal = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, chosen, strict=False))))
    assert num_emitted(drafts, chosen) == equal + 1, (
        f"{equal} of {len(drafts)} drafts come before the first wrong one; with the token chosen next {equal + 1} stand"
    )


@pytest.mark.task(4)
def test_a_verification_feeds_the_drafts_and_has_a_row_for_each():
    request = request_of([1, 2, 3], [4])
    chunk = with_drafts(Chunk(request, 3, 4, array("i", [1, 2])), [5, 6])
    assert (chunk.start, chunk.stop) == (3, 6), "the chunk begins where it began, and ends 2 drafts later"
    assert list(chunk.token_ids) == [4, 5, 6], "the runner feeds the newest token, and the drafts after it"
    assert chunk.num_logits == 3, "a row of logits at each token that it feeds"
    assert chunk.samples, "even with drafts, it still feeds its request's newest token"
    assert list(chunk.blocks) == [1, 2], "the same blocks: the drafts' slots are in them already"
    assert chunk.request is request and request.token_ids == [1, 2, 3, 4], "a guess is no token of the request"


def test_a_chunk_with_drafts_keeps_them_in_copies():
    chunk = DraftChunk(request_of([1, 2, 3], [4]), 3, 6, array("i", [1, 2]), [5, 6])
    for same in (copy(chunk), chunk._replace(blocks=array("i", [1, 2, 7]))):
        assert list(same.token_ids) == [4, 5, 6] and same.num_samples == 3


@pytest.mark.task(4)
def test_without_drafts_a_chunk_stays_as_it_is():
    chunk = Chunk(request_of([1, 2, 3], [4]), 3, 4, array("i", [1, 2]))
    same = with_drafts(chunk, [])
    assert (same.start, same.stop, same.num_logits, list(same.token_ids)) == (3, 4, 1, [4]), (
        "without drafts it feeds its own token, and samples one row"
    )


@pytest.mark.task(4)
def test_each_row_samples_for_the_answer_that_it_saw():
    request = request_of([1, 2, 3], [4], seed=7)
    rows = sample_rows(request, [5, 6])
    assert len(rows) == 3, "2 drafts have 3 rows: the request's own, and one after each draft"
    assert [row.output_ids for row in rows] == [[4], [4, 5], [4, 5, 6]], "row i's answer has the first i drafts"
    assert [row.seed for row in rows] == [request.seed] * 3, "all rows have the seed of the request"
    assert [row.prompt_ids for row in rows] == [[1, 2, 3]] * 3, "the prompt is what it was"
    assert request.output_ids == [4], "the request's own answer does not change: what was guessed may be wrong"


@pytest.mark.task(4)
@pytest.mark.parametrize("params", [dict(temperature=1, seed=3), dict(temperature=0, frequency_penalty=1.5)])
def test_each_row_draws_what_an_ordinary_step_would_draw(params):
    """Row i beside a request that really has the first i drafts: the same seed, position and penalties."""
    drafts, logits = [5, 6, 5], torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(6))
    rows = sample_rows(drawing([1, 2, 3], [4], params), drafts)
    said = [drawing([1, 2, 3], [4, *drafts[:count]], params) for count in range(4)]
    found, want = ([one.token_id for one in sample(logits, some)] for some in (rows, said))
    assert found == want, "the same seed, position and earlier tokens give the same draw"


def drawing(prompt_ids, output_ids, params):
    """Return a request with these tokens."""
    request = Request("a", list(prompt_ids), SamplingParams(**params), stop_ids=(EOS,))
    for token in output_ids:
        request.append(Sampled(token, None))
    return request


@pytest.mark.task(4)
def test_a_draft_that_was_drawn_says_nothing_about_the_next_draw():
    """Two rows with the same two likely tokens. Where row 0 drew the draft, row 1 still draws either of them."""
    logits, counts = torch.full((2, VOCAB), -math.inf), Counter()
    logits[:, 1:3] = 0.0
    for seed in range(400):
        rows = sample_rows(drawing([1, 2], [3], dict(temperature=1, seed=seed)), [1])
        first, second = (one.token_id for one in sample(logits, rows))
        counts[first, second] += first == 1
    share = counts[1, 1] / counts.total()
    assert abs(share - 0.5) < 0.15, (
        f"row 1 chose the draft's token in {share:.0%} of the draws in which row 0 did, instead of about 50 %: a row's "
        "draw does not depend on the number that the row before it drew"
    )


# ---------------------------------------------------------------- distributions

FEW = 4  # tokens besides the end token, which no test lets through
PROMPT = [1, 2, 3, 4, 1, 2]
LENGTH = 3
SAMPLES = 3000


def chain(seed=5):
    """Return random logits of a model that depends on its last token; the end token is never chosen."""
    logits = torch.randn(FEW + 1, FEW + 1, generator=torch.Generator().manual_seed(seed)) * 1.2
    logits[:, EOS] = -math.inf
    return logits


def exact(logits, last, length):
    """Return the probability of every answer of `length` tokens behind the token `last`."""
    probs = logits.double().softmax(-1)
    found = {}
    for answer in itertools.product(range(1, FEW + 1), repeat=length):
        path = (last, *answer)
        found[answer] = math.prod(float(probs[a, b]) for a, b in itertools.pairwise(path))
    return found


def chi_square(counts, expected, total):
    return sum((counts[key] - total * p) ** 2 / (total * p) for key, p in expected.items() if p)


def draw_many(drafter, seeds):
    """Return how often each answer was drawn, over the seeds."""
    engine, counts = engine_of(chain(), Speculation(max_rows=ANY_LOAD), drafter, max_num_seqs=32), Counter()
    for first in range(0, len(seeds), 32):
        params = [SamplingParams(max_tokens=LENGTH + 1, seed=seed) for seed in seeds[first : first + 32]]
        for answer in answers(engine, [PROMPT] * len(params), params):
            counts[tuple(answer[1:])] += 1  # the first token comes from the prefill
    return counts


DRAFTERS = {
    "often right": lambda request, count: [int(chain()[request.token_ids[-1]].argmax())] * count,
    "hardly ever right": lambda request, count: [int(chain()[request.token_ids[-1], 1:].argmin()) + 1] * count,
    "any": lambda request, count: [(len(request.token_ids) + i) % FEW + 1 for i in range(count)],
}


EACH_DRAFTER = pytest.mark.parametrize(
    "name", ["hardly ever right", "often right", pytest.param("any", marks=pytest.mark.nightly)]
)


@EACH_DRAFTER
def test_sampled_answers_have_exactly_the_models_distribution(name):
    counts = draw_many(Always(DRAFTERS[name]), range(SAMPLES))
    first = torch.softmax(chain()[PROMPT[-1]].double(), -1)
    expected = Counter()
    for token in range(1, FEW + 1):
        for answer, p in exact(chain(), token, LENGTH).items():
            expected[answer] += float(first[token]) * p
    cells = {answer: p for answer, p in expected.items() if p * SAMPLES >= 5}
    rest = {"rest": 1 - sum(cells.values())}
    grouped = Counter({answer: counts[answer] for answer in cells})
    grouped["rest"] = SAMPLES - sum(grouped.values())
    found, degrees = chi_square(grouped, cells | rest, SAMPLES), len(cells)
    limit = degrees + 4 * math.sqrt(2 * degrees)  # beyond 4 deviations; the seeds are fixed, so this never flickers
    assert found < limit, (
        f"chi-square {found:.0f} with {degrees} degrees of freedom: accepting changed the distribution"
    )


@EACH_DRAFTER
def test_a_draft_is_accepted_as_often_as_it_is_likely(name):
    guess, drafted, accepted, likely = DRAFTERS[name], 0, 0, 0.0
    probs = chain().double().softmax(-1)
    engine = engine_of(chain(), Speculation(1, max_rows=ANY_LOAD), Always(guess), max_num_seqs=1)
    for seed in range(600):
        request = engine.add_request(str(seed), PROMPT, SamplingParams(max_tokens=3, seed=seed))
        while engine.has_unfinished:
            last = list(request.token_ids)
            stats = engine.step().stats
            if stats.num_drafted:
                drafted, accepted = drafted + 1, accepted + stats.num_accepted
                draft = guess(Text(last), 1)[0]
                likely += float(probs[last[-1], draft])
    assert drafted > 100
    assert abs(accepted - likely) < 4 * math.sqrt(drafted) / 2, "a row that draws accepts draft d with probability p(d)"


class Text:
    """A request as a drafter reads it."""

    def __init__(self, token_ids):
        self.token_ids = token_ids


@pytest.mark.parametrize("params", [
    dict(), dict(temperature=0.6), dict(top_k=2), dict(top_p=0.7), dict(min_p=0.2), dict(repetition_penalty=1.4),
    dict(presence_penalty=1.0, frequency_penalty=0.7), dict(logit_bias={3: 4.0, 2: -5.0}), dict(min_tokens=9),
    dict(logprobs=3), dict(temperature=0, frequency_penalty=1.5), dict(temperature=0, logprobs=2),
])  # fmt: skip
def test_a_seed_gives_the_same_answer_with_and_without_drafts(params):
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    each = [SamplingParams(**{"max_tokens": 20, "seed": seed} | params) for seed in range(6)]
    prompts = [[1 + seed, 2, 3, 1 + seed, 2] for seed in range(6)]
    drafter = Always(lambda request, count: request.token_ids[-3:-1] * count)
    plain = together(plain_engine(logits), prompts, each)
    assert together(engine_of(logits, drafter=drafter), prompts, each) == plain, (
        "draws, penalties and logprobs belong to a token's position and to what came before"
    )


@pytest.mark.parametrize("min_tokens", range(8))
@pytest.mark.parametrize("ends", [{}, {"stop_token_ids": [2]}], ids=["end token", "stop token"])
def test_a_row_counts_the_drafts_before_it_as_tokens_of_the_answer(min_tokens, ends):
    """The model would end every answer at once. Where it may is not a matter of the drafts, right or wrong ones."""
    logits = cycle(3)
    logits[:, EOS] = 20.0 if not ends else -5.0
    logits[:, 2] += 20.0 * bool(ends)
    params = greedy(12, min_tokens=min_tokens, **ends)
    want = answers(plain_engine(logits), [[1, 2, 3]], params)
    assert len(want[0]) == min_tokens + 1, "it ends with the first token that may end it"
    for guess in ([EOS, 2] * 4, [1, 2, 3] * 3, want[0][1:]):
        drafter = Always(lambda request, count, guess=guess: guess[len(request.output_ids) - 1 :][:count])
        assert answers(engine_of(logits, drafter=drafter), [[1, 2, 3]], params) == want


def together(engine, prompts, params):
    """Return tokens, logprobs and reasons of requests that run together."""
    requests = [engine.add_request(str(i), ids, one) for i, (ids, one) in enumerate(zip(prompts, params, strict=True))]
    while engine.has_unfinished:
        engine.step()
    return [(request.output_ids, request.logprobs, request.finish_reason) for request in requests]


def test_a_seed_gives_the_same_answer_in_any_batch():
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    each = [SamplingParams(max_tokens=16, seed=seed) for seed in range(8)]
    prompts = [[1, 2, 3, 1, 2]] * 8
    batched = answers(engine_of(logits), prompts, each)
    alone = [answers(engine_of(logits), [ids], [one])[0] for ids, one in zip(prompts, each, strict=True)]
    assert batched == alone


def test_greedy_answers_with_every_k_are_those_without():
    want = answers(plain_engine(cycle()), [[1, 2, 3]], greedy(30))
    for k in range(1, 9):
        assert answers(engine_of(cycle(), Speculation(k, max_rows=ANY_LOAD)), [[1, 2, 3]], greedy(30)) == want
