"""Lesson 14. Guesses under a grammar: each row is masked for the drafts that it saw, and the matcher stays in place."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.engine.request import FinishReason
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.kv.manager import KvCacheManager
from mini_engine.pocket import POCKET_DIR
from mini_engine.speculation.verify import sample_rows
from mini_engine.text.tokenizer import Tokenizer
from tests.l14.toys import VOCAB, Always, cycle, engine_of, greedy, plain_engine, request_of

PROMPT = [1, 2, 3]


class Sums:
    """A grammar: no token may bring the sum to a multiple of 3, and the answer is over at the sum `end` or above."""

    def __init__(self, end=10**9):
        self.end = end

    def matcher(self):
        return SumMatcher(self)


class SumMatcher:
    """How far one answer has come."""

    error, may_end = None, True

    def __init__(self, grammar):
        self.grammar, self.total = grammar, 0

    @property
    def is_over(self):
        return self.total >= self.grammar.end

    def mask(self):
        return self.bits(self.total)

    def bits(self, total):
        allowed = sum(1 << token for token in range(1, VOCAB) if (total + token) % 3)
        return allowed.to_bytes(-(-VOCAB // 8), "little")

    def push(self, token_id):
        assert not self.is_over, "a token behind the end of the grammar"
        assert (self.total + token_id) % 3, "a token that the grammar forbids"
        self.total += token_id

    def num_valid(self, drafts):
        total = self.total
        for count, draft in enumerate(drafts):
            total += draft
            if total % 3 == 0 or total >= self.grammar.end:
                return count
        return len(drafts)

    def mask_after(self, drafts):
        return self.bits(self.total + sum(drafts))


def spoken(engine, params, prompt=PROMPT):
    """Run one request as a reader does, who ends it with its grammar; return it and the number of accepted guesses."""
    request, accepted = engine.add_request("a", prompt, params), 0
    while engine.has_unfinished:
        accepted += engine.step().stats.num_accepted
        engine.conclude(request, request.ending(stopped=False))
    return request, accepted


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("end", [12, 25, 10**9])
def test_a_grammars_answer_is_the_same_with_right_and_wrong_guesses(seed, temperature, end):
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=20, grammar=Sums(end), logprobs=1)
    want, _ = spoken(plain_engine(logits), params)

    def mostly_right(request, count):
        at = len(request.output_ids)
        return [token if (at + i) % 4 else 2 for i, token in enumerate((want.output_ids + [2] * 20)[at : at + count])]

    found, accepted = spoken(engine_of(logits, drafter=Always(mostly_right)), params)
    assert (found.output_ids, found.logprobs, found.finish_reason) == (
        want.output_ids, want.logprobs, want.finish_reason
    )  # fmt: skip
    assert accepted > 0 or len(want.output_ids) < 4, "under a grammar nothing was guessed"


def test_drafts_end_before_the_first_that_the_grammar_forbids():
    """The sum is 4 after the prompt's step; 1 and 2 are allowed (5, 7), then 2 is not (9)."""
    engine = engine_of(cycle(), drafter=Always(lambda request, count: [1, 2, 2, 1][:count]))
    request = engine.add_request("a", PROMPT, greedy(12, grammar=Sums()))
    engine.step()
    assert request.output_ids == [4]
    [chunk] = engine.decoding.plan(engine.scheduler)
    assert list(chunk.drafts) == [1, 2]


def test_no_draft_ends_the_answer():
    """Behind the grammar's end no token may follow, so the one that ends it is chosen by a row, not guessed."""
    engine = engine_of(cycle(), drafter=Always(lambda request, count: [1, 2, 1, 2][:count]), manager=KvCacheManager)
    request = engine.add_request("a", PROMPT, greedy(12, grammar=Sums(7)))
    engine.step()
    [chunk] = engine.decoding.plan(engine.scheduler)
    assert list(chunk.drafts) == [1], "4 + 1 + 2 is the end"
    engine.decoding.record(engine.scheduler, [chunk], engine._run([chunk]))
    assert request.matcher.is_over and request.output_ids == [4, 1, 2]
    engine.conclude(request, request.ending(stopped=False))
    assert request.finish_reason == FinishReason.STOP


# ---------------------------------------------------------------- llguidance's grammars

RECORDS = [{"id": i, "name": f"part {i}", "in_stock": True} for i in range(1, 4)]
SCHEMA = {
    "type": "array", "minItems": 3, "maxItems": 4,
    "items": {
        "type": "object", "required": ["id", "name", "in_stock"], "additionalProperties": False,
        "properties": {
            "id": {"type": "integer", "maximum": 99}, "name": {"type": "string", "maxLength": 12},
            "in_stock": {"type": "boolean"},
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(POCKET_DIR)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    pytest.importorskip("llguidance")
    from mini_engine.grammars.compiler import GrammarCompiler

    return GrammarCompiler(tokenizer, len(tokenizer.token_bytes), (0,))


@pytest.fixture(scope="module")
def grammar(compiler):
    from mini_engine.grammars.output_forms import OutputForm

    return compiler.compile_sync(OutputForm(SCHEMA))


@pytest.fixture(scope="module")
def record_ids(tokenizer):
    return tokenizer.encode(json.dumps(RECORDS))


@given(at=st.integers(0, 40), count=st.integers(0, 12))
def test_looking_ahead_changes_nothing_and_sees_what_a_fresh_matcher_sees(grammar, record_ids, at, count):
    matcher, fresh = grammar.matcher(), grammar.matcher()
    for token in record_ids[:at]:
        matcher.push(token)
        fresh.push(token)
    before, drafts = matcher.mask(), record_ids[at : at + count]
    assert matcher.num_valid(drafts) == len(drafts), "these tokens fit, and the list may go on behind them"
    found = matcher.mask_after(drafts)
    for token in drafts:
        fresh.push(token)
    assert found == fresh.mask(), "the mask behind the drafts"
    assert matcher.mask() == before and not matcher.is_over and matcher.error is None, "the matcher has moved"


def test_a_forbidden_draft_and_the_one_that_ends_the_answer_are_not_valid(grammar, record_ids, tokenizer):
    matcher = grammar.matcher()
    four = tokenizer.encode(json.dumps([*RECORDS, RECORDS[0]]))
    assert matcher.num_valid(four) == len(four) - 1, "the closing bracket behind the fourth record ends the answer"
    wrong = tokenizer.encode(" zebra")[0]
    assert matcher.num_valid([*four[:5], wrong, *four[5:]]) == 5
    for token in four:
        matcher.push(token)
    assert matcher.is_over and matcher.error is None and matcher.num_valid(four) == 0


def test_a_limit_that_is_met_ahead_does_not_end_the_answer(compiler, tokenizer):
    from llguidance import LLMatcher, LLParserLimits

    from mini_engine.grammars.matchers import CompiledGrammar

    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(60)}}
    form = LLMatcher.grammar_from_json_schema({"type": "array", "prefixItems": [{"const": 1}, wide]})
    limits = LLParserLimits(verbose_errors=False, step_max_items=100)
    matcher = CompiledGrammar(LLMatcher(compiler.vocabulary, form, log_level=0, limits=limits)).matcher()
    opening, *drafts = tokenizer.encode("[1, {")
    matcher.push(opening)
    before = matcher.mask()
    matcher.mask_after(drafts)
    assert matcher.error is None and matcher.mask() == before, "a limit behind a guess has spoiled the matcher"
    for token in drafts:
        matcher.push(token)
    matcher.mask()
    matcher.push(0)
    assert matcher.error is not None, "this grammar has no limit behind the drafts, and the test shows nothing"


def test_each_row_is_masked_for_the_drafts_that_it_saw():
    request = request_of(PROMPT, [4], grammar=Sums())
    rows = sample_rows(request, [1, 2])
    masks = [row.matcher.mask() for row in rows]
    assert masks == [SumMatcher.bits(request.matcher, total) for total in (4, 5, 7)]
    assert request.matcher.total == 4, "the request's own matcher has moved"
