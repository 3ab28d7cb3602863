"""Lesson 14. The outcome of one verification, in numbers: tokens that stand, KV that goes, ends, counts."""

import pytest

from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.kv.manager import KvCacheManager
from mini_engine.speculation.lookup import LookupDrafter
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.speculator import Speculator
from mini_engine.speculation.verify import DraftChunk
from tests.l14.toys import EOS, greedy

pytestmark = pytest.mark.task(5)

PROMPT, FIRST = [1, 2, 3, 4, 5], 6
WRONG = 11
OUTCOMES = [
    ([7, 8, 9], [7, 8, 9, 10], [7, 8, 9, 10]),
    ([7, 8, 9], [7, 8, WRONG, 10], [7, 8, WRONG]),
    ([7, 8, 9], [WRONG, 8, 9, 10], [WRONG]),
    ([7], [7, 8], [7, 8]),
    ([7, 8, 9, 10, 5, 4], [7, WRONG, 9, 10, 5, 4, 3], [7, WRONG]),
]
each_outcome = pytest.mark.parametrize(("drafts", "chosen", "gained"), OUTCOMES)


class Notes:
    """Stands in for Adaptive: keeps what it is told."""

    def __init__(self):
        self.told = []

    def record(self, drafted, accepted):
        self.told.append((drafted, accepted))


@pytest.fixture(autouse=True)
def counted_without_the_students_function(monkeypatch):
    """How many rows stand is another task; here it is counted again."""

    def standing(drafts, chosen):
        return 1 + next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))

    monkeypatch.setattr("mini_engine.speculation.speculator.num_emitted", standing)


class Verification:
    """A request that has been given one token, and now has its drafts verified."""

    def __init__(self, drafts, chosen, manager=KvCacheManager, max_tokens=20, aborted=False, counted=(0, 0)):
        settings = Speculation()
        self.drafting = Speculator(settings, LookupDrafter(settings))
        self.scheduler = Scheduler(manager(16, 4), SchedulerConfig(watermark=0.0))
        self.request = Request("a", list(PROMPT), greedy(max_tokens), stop_ids=(EOS,))
        self.notes = self.drafting.adaptive[self.request] = Notes()  # pyright: ignore[reportArgumentType]
        self.scheduler.add(self.request)
        self.scheduler.update(self.scheduler.schedule(), [Sampled(FIRST, None)])
        [chunk] = self.scheduler.schedule()
        self.manager.grow("a", chunk.stop + len(drafts))
        if aborted:
            self.scheduler.finish(self.request, FinishReason.ABORT)
        self.drafting.num_drafted, self.drafting.num_accepted = counted  # of other requests in the same step
        chunk = DraftChunk(self.request, chunk.start, chunk.stop + len(drafts), chunk.blocks, drafts)
        try:
            self.new_tokens = self.drafting.accept(self.scheduler, chunk, [Sampled(token, None) for token in chosen])
        except KeyError as error:
            if self.request.is_finished:
                error.add_note("the answer has ended, and a request that has ended no longer has a table")
            raise

    @property
    def manager(self):
        return self.scheduler.manager

    @property
    def gained(self):
        return self.request.output_ids[1:]


@each_outcome
def test_the_tokens_that_stand_are_the_answers_next_tokens(drafts, chosen, gained):
    done = Verification(drafts, chosen)
    assert done.gained == gained, (
        "the accepted drafts, and the token that was chosen after them: a step each, one position further"
    )
    assert done.request.token_ids == [*PROMPT, FIRST, *gained], "the prompt, the first token, and what stands, in order"
    assert done.request.num_computed_tokens == len(done.request.token_ids) - 1, (
        "all tokens but the newest have KV: each that stands counts as a step of its own, one position further"
    )


def test_the_newest_token_is_reported():
    done = Verification([7, 8, 9], [7, 8, WRONG, 10])
    assert {name: one.token_id for name, one in done.new_tokens.items()} == {"a": WRONG}, (
        "request id to newest token: of 7, 8 and 11 the last one"
    )


@each_outcome
def test_kv_of_wrong_drafts_is_truncated(drafts, chosen, gained):
    done = Verification(drafts, chosen)
    table, computed = done.manager.tables["a"], done.request.num_computed_tokens
    assert table.num_tokens <= computed, "the table still counts rejected tokens"
    assert table.num_tokens >= computed, "the last accepted draft has KV and stays"
    assert len(table.blocks) == -(-computed // 4), "a block that holds only rejected tokens is still held"
    assert done.manager.blocks_by_state.held == len(table.blocks)


@pytest.mark.parametrize(
    ("drafts", "chosen"), [([7, EOS, 9, 10], [7, EOS, 9, 10, 5]), ([7, EOS, 9], [7, EOS, WRONG, 10]), ([7], [7, EOS])]
)
def test_the_answer_ends_at_an_end_token_among_them(drafts, chosen):
    done = Verification(drafts, chosen)
    assert done.gained == [7, EOS], "tokens after the end token are not part of the answer: it goes on past the end"
    assert done.request.finish_reason == FinishReason.STOP, "the end token is among the tokens that stand"
    assert done.manager.blocks_by_state.held == 0, "an answer that has ended holds nothing"


@pytest.mark.parametrize("max_tokens", [2, 3, 4])
def test_the_answer_ends_at_max_tokens_among_them(max_tokens):
    done = Verification([7, 8, 9, 10], [7, 8, 9, 10, 5], max_tokens=max_tokens)
    assert done.request.output_ids == [FIRST, 7, 8, 9][:max_tokens], "the answer has max_tokens tokens, and no more"
    assert done.request.finish_reason == FinishReason.LENGTH, "the last allowed token is among those that stand"
    assert done.manager.blocks_by_state.held == 0, "an answer that has ended holds nothing"


@each_outcome
def test_the_tree_learns_what_stands_and_nothing_else(drafts, chosen, gained):
    done = Verification(drafts, chosen, manager=caching_manager)
    done.scheduler.finish(done.request, FinishReason.ABORT)  # now its whole blocks go to the tree
    whole = (len(PROMPT) + len(gained)) // 4  # blocks of 4; the newest token has no KV
    right, guessed = [*PROMPT, FIRST, *gained, 0, 0, 0], [*PROMPT, FIRST, *drafts, 0, 0, 0]
    tree = done.manager.coordinator.prefixes.tree
    assert tree.peek(right).num_tokens == 4 * whole, "a whole block of the answer is not found again"
    assert tree.num_blocks == whole, "the tree has a block of tokens that no answer contains"
    same = next((i for i, pair in enumerate(zip(right, guessed, strict=False)) if pair[0] != pair[1]), len(right))
    assert tree.peek(guessed).num_tokens <= same, "the tree has a prefix with a wrong draft in it"


@pytest.mark.parametrize(
    ("drafts", "chosen", "accepted"),
    [([7, 8, 9], [7, 8, WRONG, 10], 2), ([7, 8], [WRONG, 8, 9], 0), ([EOS, 8, 9], [EOS, 8, 9, 10], 0)],
)
def test_only_drafts_that_became_tokens_of_the_answer_count(drafts, chosen, accepted):
    done = Verification(drafts, chosen)
    assert done.drafting.num_drafted == len(drafts), "num_drafted counts the drafts"
    assert done.drafting.num_accepted == accepted, "a step yields one token in any case; the others were saved steps"


def test_the_counts_of_a_steps_requests_are_added_up():
    done = Verification([7, 8, 9], [7, 8, WRONG, 10], counted=(5, 1))
    counts = done.drafting.num_drafted, done.drafting.num_accepted
    assert counts == (5 + 3, 1 + 2), "another request of the step had 5 drafts, 1 of them accepted; this one 3 and 2"


@pytest.mark.parametrize(("chosen", "came_true"), [([7, 8, 9, 10], 3), ([7, 8, WRONG, 10], 2), ([WRONG, 8, 9, 10], 0)])
def test_it_is_noted_how_many_came_true(chosen, came_true):
    assert Verification([7, 8, 9], chosen).notes.told == [(3, came_true)], "Adaptive.record is told (guessed, accepted)"


def test_a_request_that_was_aborted_meanwhile_gains_nothing():
    done = Verification([7, 8], [7, 8, 9], aborted=True)
    assert (done.new_tokens, done.gained) == ({}, []), "an answer that was aborted during the step gains no token"
    assert done.drafting.num_accepted == 0, "and saves no step"
    assert done.manager.blocks_by_state.held == 0, "its blocks were freed when it was aborted"
