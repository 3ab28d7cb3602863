"""Lesson 14. The engine with speculation: ends of answers, budgets, aborts, failures, and what may not be guessed."""

import logging

import pytest
import torch

from mini_engine.engine.grammar import Anything
from mini_engine.engine.request import FinishReason
from mini_engine.engine.scheduler import Chunk
from mini_engine.speculation.options import Speculation
from tests.l14.toys import (
    ANY_LOAD,
    EOS,
    VOCAB,
    Always,
    answers,
    cycle,
    drain,
    engine_of,
    greedy,
    plain_engine,
)

PROMPT = [1, 2, 3]


def right(request, count):
    """What `cycle()` says next."""
    return [(request.token_ids[-1] + i) % 4 + 1 for i in range(count)]


def wrong(request, count):
    return [9] * count


def held(engine):
    return engine.scheduler.manager.blocks_by_state.held


def guessing(names, max_tokens, guess=right, speculation=None, **limits):
    """Return an engine that guesses, with a request of each name that has not begun."""
    engine = engine_of(cycle(), speculation, Always(guess), **limits)
    for name in names:
        engine.add_request(name, PROMPT, greedy(max_tokens))
    return engine


def drafted(stats):
    return [one.num_drafted for one in stats]


def test_right_guesses_save_steps():
    engine = guessing("a", 24)
    [request] = engine.scheduler.waiting
    stats = drain(engine)
    assert request.output_ids == [4, 1, 2, 3] * 6
    assert len(stats) == 4, "a prefill, and then steps of 5, 9 and 9 tokens, with 4, 8 and 8 guesses"


def test_the_statistics_count_guesses_and_accepted_ones():
    stats = drain(guessing("a", 12, lambda request, count: [*right(request, count)[:2], 9, 9][:count]))
    assert [(one.num_drafted, one.num_accepted) for one in stats[:3]] == [(0, 0), (4, 2), (3, 2)]


def test_a_decoding_request_counts_once_however_many_rows_it_has():
    assert {one.decode_tokens for one in drain(guessing("a", 12))[1:]} == {1}


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_answer_is_longer_than_max_tokens(max_tokens):
    engine = engine_of(cycle(), drafter=Always(right))
    request, slots = engine.add_request("a", PROMPT, greedy(max_tokens)), []
    engine.runner.during = lambda: slots.append(engine.scheduler.manager.tables["a"].num_tokens)
    drain(engine)
    assert max(slots) <= request.max_kv_tokens, "a draft behind the last token has no slot"
    assert len(request.output_ids) == max_tokens and request.finish_reason == FinishReason.LENGTH
    assert not held(engine)


@pytest.mark.parametrize("at", range(1, 9))
def test_an_end_token_among_accepted_guesses_ends_the_answer(at):
    """The model says the end token at one place and would go on behind it; the drafter knows all of that."""
    logits = torch.zeros(VOCAB, VOCAB)
    says = [*range(1, at + 1), EOS, 11, 11, 11, 11, 11, 11, 11]
    for token, following in zip([10, *says], says, strict=False):
        logits[token, following] = 9.0
    drafter = Always(lambda request, count: says[len(request.output_ids) :])
    engine = engine_of(logits, Speculation(16, max_rows=ANY_LOAD), drafter)
    request = engine.add_request("a", [10], greedy(16))
    drain(engine)
    assert request.output_ids == [*range(1, at + 1), EOS], "tokens behind the end token were kept"
    assert request.finish_reason == FinishReason.STOP
    assert request.num_computed_tokens == len(request.token_ids) - 1, "the KV behind the end was not given up"
    assert not held(engine)
    cached = engine.scheduler.manager.coordinator.prefixes.tree.num_blocks
    assert cached == request.num_computed_tokens // 4, "the tree has the whole blocks before the end token, no more"


def test_no_step_is_larger_than_its_budget():
    engine = guessing("abcd", 20, max_num_seqs=4, max_num_batched_tokens=9)
    while engine.has_unfinished:
        stats = engine.step().stats
        fed = stats.prefill_tokens + stats.decode_tokens + stats.num_drafted
        assert fed <= 9, f"{fed} tokens in a step of at most 9"


def test_the_last_token_of_the_budget_is_used():
    _, first, *_ = drafted(drain(guessing("ab", 20, max_num_seqs=2, max_num_batched_tokens=10)))
    assert first == 2 * 4, "2 tokens and 4 guesses for each request fit into a step of 10 tokens"


def test_prompts_come_before_guesses():
    engine = guessing("a", 20, max_num_seqs=4, max_num_batched_tokens=8)
    engine.step()
    engine.add_request("b", [1, 2, 3, 4] * 10, greedy(4))
    stats = engine.step().stats
    assert (stats.prefill_tokens, stats.num_drafted) == (7, 0), "drafts get what prompts leave of the budget"


def test_a_busy_engine_guesses_nothing():
    engine = guessing("abcde", 20, speculation=Speculation(8, max_rows=8), num_blocks=200)
    assert sum(drafted(drain(engine))) == 0, "with 5 requests and 8 rows no row is free"
    engine.add_request("alone", PROMPT, greedy(20))
    assert sum(drafted(drain(engine))) > 0


def test_the_last_free_rows_are_used():
    most = max(drafted(drain(guessing("abcd", 20, speculation=Speculation(8, max_rows=8), num_blocks=200))))
    assert most >= 4, f"4 requests and 8 rows: a guess for each, and no step had more than {most}"


def test_the_last_free_block_is_used():
    counts = [(one.num_drafted, one.num_accepted) for one in drain(guessing("a", 6, num_blocks=1 + 2))]
    assert counts == [(0, 0), (4, 4)], "the prompt and 5 tokens of the answer fit into 2 blocks exactly, guesses too"


def test_a_drafter_is_asked_for_what_there_is_room_for_and_not_if_there_is_none():
    asked = []
    engine = guessing("a", 9, lambda request, count: asked.append(count) or right(request, count))
    drain(engine)
    assert asked == [4, 2], "k is 4; then 6 of 9 tokens are there, and behind the last one nothing is guessed"
    engine.add_request("b", PROMPT, greedy(2))
    drain(engine)
    assert asked == [4, 2], "of 2 tokens the first comes with the prompt, and the other one is the last"


def test_a_step_without_a_guess_is_an_ordinary_step():
    engine = guessing("a", 6, lambda request, count: [])
    while engine.has_unfinished:
        [chunk] = chunks = engine.decoding.plan(engine.scheduler)
        assert type(chunk) is Chunk, "lesson 10's captured steps are replayed only in steps without drafts"
        engine.decoding.record(engine.scheduler, chunks, engine._run(chunks))


@pytest.mark.parametrize("num_blocks", range(9, 14))
def test_guesses_take_no_block_that_is_promised(num_blocks):
    """One request decodes, another one's prompt is read in chunks: the rest of it has been promised room."""
    engine = engine_of(cycle(), drafter=Always(right), num_blocks=1 + num_blocks, chunked_prefill_size=4)
    scheduler, left = engine.scheduler, []
    engine.add_request("a", PROMPT, greedy(14))
    engine.step()
    long = engine.add_request("b", [1, 2, 3, 4] * 7, greedy(2))
    promised = scheduler.reserved_blocks
    engine.runner.during = lambda: left.append(
        scheduler.manager.num_free_blocks - sum(map(promised, scheduler.running))
    )
    drain(engine)
    assert min(left) >= 0, "a guess took a block that the other request's prompt was promised"
    assert (long.output_ids, long.error) == ([1, 2], None), "a chunk that samples nothing beside one with guesses"


def test_a_step_that_fails_leaves_nothing_behind():
    engine = engine_of(cycle(), drafter=Always(right))
    first = engine.add_request("a", PROMPT, greedy(20))
    engine.step()

    def fail():
        raise RuntimeError("on purpose")

    engine.runner.during = fail
    engine.step()
    engine.runner.during = lambda: None
    assert first.finish_reason == FinishReason.ERROR and not held(engine)
    assert answers(engine, [PROMPT], greedy(8)) == [[4, 1, 2, 3] * 2]


@pytest.mark.parametrize("drafter", [Always(right), Always(wrong), Always(lambda r, n: [*right(r, n)[:2], 9, 9][:n])])
def test_log_probabilities_of_a_prompt_are_computed_beside_guesses(drafter):
    """In chunks of 3 tokens, each beside a request that decodes, with drafts."""
    logits = cycle() + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) / 10
    params = [greedy(30, logprobs=2, ignore_eos=True), greedy(12, prompt_logprobs=1, ignore_eos=True)]
    limits, found = dict(chunked_prefill_size=3), []
    for engine in (plain_engine(logits, **limits), engine_of(logits, drafter=drafter, **limits)):
        requests = [engine.add_request("b", [1, 2, 3, 4, 1], params[0])]
        while not requests[0].output_ids:
            engine.step()
        requests.append(engine.add_request("a", [3, 4, 3, 4, 5, 6, 7, 8, 9, 1], params[1]))
        stats = [engine.step().stats for _ in range(3)]
        beside = sum(one.num_drafted for one in stats if one.prefill_tokens)
        drain(engine)
        found.append([(r.output_ids, r.logprobs, r.prompt_logprobs) for r in requests])
    assert found[0] == found[1]
    assert beside > 0, "no guess was verified beside the prompt's chunks"


# ---------------------------------------------------------------- what fails beside guesses


class Fails:
    """Raises in whatever is asked of it: a drafter, or the part of a grammar that looks ahead."""

    def propose(self, request, count):
        raise RuntimeError("no guess today")


class LooksNoFurther(Anything):
    """A grammar that allows everything and cannot look ahead."""

    def __init__(self, method):
        self.method = method

    def matcher(self):
        return self

    def mask(self):
        return b"\xff" * 4

    def mask_after(self, drafts):
        return 1 / 0 if self.method == "mask_after" else self.mask()

    def num_valid(self, drafts):
        return 1 / 0 if self.method == "num_valid" else len(drafts)


def test_a_drafter_that_fails_guesses_nothing(caplog):
    caplog.set_level(logging.CRITICAL)
    assert answers(engine_of(cycle(), drafter=Fails()), [PROMPT, [5]], greedy(9)) == answers(
        plain_engine(cycle()), [PROMPT, [5]], greedy(9)
    )


@pytest.mark.parametrize("method, ends", [("num_valid", "length"), ("mask_after", "error")])
def test_a_grammar_that_cannot_look_ahead_leaves_other_answers_alone(method, ends, caplog):
    caplog.set_level(logging.CRITICAL)
    engine = engine_of(cycle(), drafter=Always(right))
    other = engine.add_request("other", PROMPT, greedy(12))
    failing = engine.add_request("failing", PROMPT, greedy(12, grammar=LooksNoFurther(method)))
    drain(engine)
    assert other.output_ids == [4, 1, 2, 3] * 3 and other.finish_reason == "length"
    assert failing.finish_reason == ends and failing.output_ids == [4, 1, 2, 3] * 3 * (ends == "length") + [4] * (
        ends == "error"
    )
    assert held(engine) == 0


def test_a_row_without_numbers_behind_a_wrong_guess_is_nobodys():
    logits = cycle()
    logits[9] = float("nan")  # `wrong` guesses 9, and no answer says it
    found = answers(engine_of(logits, drafter=Always(wrong)), [PROMPT, [5]], greedy(9))
    assert found == answers(plain_engine(cycle()), [PROMPT, [5]], greedy(9))


@pytest.mark.parametrize("drafter", [Always(right), Always(wrong)])
def test_a_row_without_numbers_ends_the_answer_that_reaches_it(drafter, caplog):
    caplog.set_level(logging.CRITICAL)
    logits = cycle()
    logits[3] = float("nan")
    engine = engine_of(logits, drafter=drafter)
    other = engine.add_request("other", [4], greedy(2))
    request = engine.add_request("a", [5], greedy(12))
    drain(engine)
    assert request.finish_reason == "error" and request.output_ids == [2, 3][: len(request.output_ids)]
    assert other.output_ids == [1, 2] and other.finish_reason == "length" and held(engine) == 0
