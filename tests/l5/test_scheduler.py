"""Lesson 5. The scheduler's decisions, one at a time, on hand-made queues."""

import pytest

from mini_engine.base.errors import UserError
from mini_engine.engine.grammar import Anything
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.scheduler import Chunk, Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from tests.l5.helpers import CountingManager, by_id, request_of, scheduler_with
from tests.stubs import EOS, greedy
from tests.support import refused


def decoding(manager, name, tokens=5):
    """Return a running request with one token left to compute, `tokens` in total."""
    return manager.holding(request_of(tokens - 1, name=name, computed=tokens - 1, outputs=[9]), tokens - 1)


def prefilling(manager, name, prompt_len, computed):
    """Return a running request in the middle of its prompt."""
    return manager.holding(request_of(prompt_len, name=name, computed=computed), computed)


# --- which requests continue, and with how many tokens


@pytest.mark.task(2)
def test_each_decoding_request_gets_one_token():
    manager = CountingManager()
    scheduler = scheduler_with(manager, running=[decoding(manager, "a"), decoding(manager, "b", tokens=8)])
    assert by_id(scheduler.continue_running(16)) == [("a", 4, 5), ("b", 7, 8)], (
        "(request, start, stop): each has one token without KV, its newest, and that is what the step computes"
    )


@pytest.mark.task(2)
def test_a_prompt_gets_what_the_decodes_leave_of_the_budget():
    manager = CountingManager()
    running = [prefilling(manager, "a", 20, computed=4), decoding(manager, "b"), decoding(manager, "c")]
    chunks = scheduler_with(manager, running=running).continue_running(8)
    assert by_id(chunks) == [("a", 4, 10), ("b", 4, 5), ("c", 4, 5)], (
        "of a budget of 8 the two decodes take 2 first; the prompt, although it arrived earlier, gets the remaining 6"
    )


@pytest.mark.task(2)
def test_a_long_prompt_does_not_starve_decoding_requests():
    manager = CountingManager(usable=80)
    running = [prefilling(manager, "a", 200, computed=0), *(decoding(manager, name) for name in "bcdefgh")]
    chunks = scheduler_with(manager, running=running).continue_running(8)
    got = {chunk.request.id for chunk in chunks}
    assert got >= set("bcdefgh"), (
        f"{sorted(set('bcdefgh') - got)} should decode but got no token: the prompt took the budget"
    )
    assert sum(stop - start for _, start, stop in by_id(chunks)) <= 8, "the step is larger than its token budget"


@pytest.mark.task(2)
def test_no_step_is_larger_than_its_budget():
    manager = CountingManager()
    running = [prefilling(manager, name, 10, computed=0) for name in "ab"]
    assert by_id(scheduler_with(manager, running=running).continue_running(13)) == [("a", 0, 10), ("b", 0, 3)], (
        "two prompts of 10 share a budget of 13: the older one takes 10 of it, the next one the remaining 3"
    )
    assert by_id(scheduler_with(manager, running=running).continue_running(10)) == [("a", 0, 10)], (
        "the first prompt uses up the budget of 10, so the second gets no chunk in this step, not even an empty one"
    )


@pytest.mark.task(2)
def test_prompts_that_overtake_come_before_the_others():
    manager = CountingManager(usable=20)
    running = [
        prefilling(manager, "a", 20, computed=4),
        decoding(manager, "b"),
        prefilling(manager, "c", 5, computed=0),
    ]
    scheduler = scheduler_with(manager, running=running)
    scheduler.ahead = {running[2]}
    assert by_id(scheduler.continue_running(8)) == [("a", 4, 6), ("b", 4, 5), ("c", 0, 5)], (
        "b decodes and takes 1 of 8 tokens; c overtakes a and takes 5; the other 2 are a's"
    )


@pytest.mark.task(2)
def test_a_chunk_has_at_most_chunked_prefill_size_tokens():
    manager = CountingManager()
    running = [prefilling(manager, name, 10, computed=2) for name in "ab"]
    chunks = scheduler_with(manager, running=running, chunked_prefill_size=3).continue_running(16)
    assert by_id(chunks) == [("a", 2, 5), ("b", 2, 5)], (
        "chunked_prefill_size is 3: no prompt gets more in a step, even if the budget of 16 would allow it"
    )


@pytest.mark.task(2)
def test_the_last_token_of_a_prompt_is_computed_too():
    manager = CountingManager()
    running = [prefilling(manager, "a", 5, computed=4), prefilling(manager, "b", 5, computed=0)]
    chunks = scheduler_with(manager, running=running, chunked_prefill_size=4).continue_running(16)
    assert by_id(chunks) == [("a", 4, 5), ("b", 0, 4)], "one token of a's prompt is left: it gets a chunk of one token"


@pytest.mark.task(2)
def test_chunks_hold_blocks_for_their_tokens():
    manager = CountingManager()
    running = [decoding(manager, "a", tokens=5), prefilling(manager, "b", 9, computed=0)]
    chunks = scheduler_with(manager, running=running).continue_running(16)
    blocks = {chunk.request.id: list(chunk.blocks) for chunk in chunks}
    assert blocks == {"a": [1, 2], "b": [1, 2, 3]}, (
        "a chunk has blocks of 4 for all tokens before its stop, 5 and 9 here: grow to chunk.stop"
    )


def test_only_a_chunk_that_ends_with_the_newest_token_samples():
    request = request_of(10)
    assert not Chunk(request, 0, 9, []).samples, "a chunk that is not the last of its prompt chooses no token"
    assert Chunk(request, 9, 10, []).samples


# --- promises and preemption


@pytest.mark.task(3)
def test_promises_that_fit_preempt_no_request():
    manager = CountingManager(usable=5)
    running = [decoding(manager, "a", tokens=5), prefilling(manager, "b", 12, computed=4)]
    scheduler = scheduler_with(manager, running=running)
    assert scheduler.make_room() == 0, (
        "of 5 blocks 2 are held, 1 is owed to a's fifth token and 2 to the rest of b's prompt"
    )
    assert scheduler.running == running


@pytest.mark.task(3)
def test_make_room_returns_the_free_blocks_that_are_not_promised():
    manager = CountingManager(usable=9)
    running = [decoding(manager, "a", tokens=5), prefilling(manager, "b", 12, computed=4)]
    assert scheduler_with(manager, running=running).make_room() == 4, (
        "7 of 9 blocks are free; 1 is owed to a's fifth token and 2 to the rest of b's prompt"
    )


@pytest.mark.task(3)
def test_the_newest_request_is_preempted():
    manager = CountingManager(usable=3)
    running = [decoding(manager, name, tokens=5) for name in "abc"]
    scheduler = scheduler_with(manager, running=running)
    scheduler.make_room()
    assert [r.id for r in scheduler.running] == ["a"], "a and b each need one more block; c is preempted, and then b"
    assert {r.id for r in scheduler.waiting} == {"b", "c"}, "a preempted request keeps its tokens and waits again"


@pytest.mark.task(3)
def test_no_more_requests_are_preempted_than_necessary():
    manager = CountingManager(usable=4)
    running = [decoding(manager, name, tokens=5) for name in "abc"]
    scheduler = scheduler_with(manager, running=running)
    spare = scheduler.make_room()
    assert [r.id for r in scheduler.running] == ["a", "b"], "a and b need two blocks: the free one and c's are enough"
    assert spare == 0, "after c's preemption 2 blocks are free, and both are owed to a and b"


@pytest.mark.task(3)
def test_a_preempted_request_computes_all_its_tokens_again():
    manager = CountingManager()
    request = manager.holding(request_of(6, computed=7, outputs=[11, 12]), 7)
    scheduler = scheduler_with(manager, running=[request])
    scheduler.preempt(request)
    assert request.num_computed_tokens == 0, "its blocks are gone, and its KV with them: no token counts as computed"
    assert request.token_ids == [1, 2, 3, 4, 5, 6, 11, 12], (
        "the answer so far stays: it is computed again like a prompt"
    )
    assert (scheduler.running, scheduler.waiting) == ([], [request]), "it leaves the running requests and waits"
    assert (request.num_preemptions, scheduler.num_preemptions) == (1, 1), "request and scheduler each count it"
    assert manager.log == [("free", "a", [1, 2, 3, 4, 5, 6, 11])], (
        "the manager frees its blocks and is told which tokens had KV: computed_ids, the first 7"
    )


@pytest.mark.task(3)
def test_a_preempted_request_waits_ahead_of_later_arrivals():
    manager = CountingManager()
    running = [decoding(manager, name) for name in "ab"]
    scheduler = scheduler_with(manager, running=running, waiting=[request_of(3, name=name) for name in "cd"])
    scheduler.preempt(running[1])
    assert [r.id for r in scheduler.waiting] == ["b", "c", "d"], (
        "b arrived before c: it must not go to the end of the queue"
    )


@pytest.mark.task(3)
def test_a_preempted_request_waits_behind_an_older_one_that_waits():
    manager = CountingManager()
    running = [decoding(manager, name) for name in "bc"]
    scheduler = scheduler_with(manager, running=running, waiting=[request_of(3, name=name) for name in "ad"])
    scheduler.preempt(running[0])
    assert [r.id for r in scheduler.waiting] == ["a", "b", "d"], (
        "a arrived before b and has been told to wait a step: b goes behind it, where the policy's order puts it"
    )


# --- admission


@pytest.mark.task(4)
def test_waiting_requests_are_admitted_in_order_with_a_first_chunk():
    scheduler = scheduler_with(waiting=[request_of(6, name="a"), request_of(5, name="b")])
    assert by_id(scheduler.admit(budget=8, spare=8)) == [("a", 0, 6), ("b", 0, 2)], (
        "a gets 6 tokens and b the other 2: the budget of 8 runs out in b's prompt"
    )
    assert [r.id for r in scheduler.running] == ["a", "b"] and scheduler.waiting == []


@pytest.mark.task(4)
def test_no_request_is_admitted_without_a_token_to_compute():
    scheduler = scheduler_with(waiting=[request_of(8, name="a"), request_of(5, name="b")])
    assert by_id(scheduler.admit(budget=8, spare=8)) == [("a", 0, 8)], (
        "a's chunk uses up the budget of 8 tokens. No budget is left for b: it would hold blocks and compute nothing"
    )
    assert [r.id for r in scheduler.waiting] == ["b"], "b keeps waiting"


@pytest.mark.task(4)
def test_admissions_in_one_step_count_every_promise():
    waiting = [request_of(20, name="a"), request_of(12, name="b"), request_of(4, name="c")]
    scheduler = scheduler_with(CountingManager(usable=7), waiting=waiting, chunked_prefill_size=4)
    admitted = scheduler.admit(budget=16, spare=7)
    assert by_id(admitted) == [("a", 0, 4)], (
        "a was promised 5 of 7 blocks, although its first chunk took one; b needs 3 of the other 2; c must not overtake"
    )
    assert [r.id for r in scheduler.waiting] == ["b", "c"]


@pytest.mark.task(4)
def test_a_request_that_is_not_admitted_holds_nothing():
    manager = CountingManager(usable=7)
    scheduler = scheduler_with(manager, waiting=[request_of(20, name="a"), request_of(12, name="b")])
    scheduler.admit(budget=64, spare=7)
    assert list(manager.held) == ["a"], "b does not fit: ask for its cost first, so that nothing has to be undone"


@pytest.mark.task(4)
def test_blocks_promised_to_running_requests_are_not_given_away():
    scheduler = scheduler_with(CountingManager(usable=8), waiting=[request_of(12, name="a")])
    assert scheduler.admit(budget=16, spare=2) == [], "8 blocks are free, but 6 of them are promised"


@pytest.mark.task(4)
def test_no_more_than_max_num_seqs_run():
    manager = CountingManager()
    waiting = [request_of(1, name=name) for name in "bcd"]
    scheduler = scheduler_with(manager, running=[decoding(manager, "a")], waiting=waiting, max_num_seqs=3)
    assert by_id(scheduler.admit(budget=16, spare=6)) == [("b", 0, 1), ("c", 0, 1)], (
        "max_num_seqs is 3 and a runs already: two seats are left for the three that wait"
    )


@pytest.mark.task(4)
def test_the_watermark_stays_free_per_running_request():
    manager = CountingManager(usable=8)
    running = [decoding(manager, name, tokens=4) for name in "ab"]
    scheduler = scheduler_with(manager, running=running, waiting=[request_of(20, name="c")], watermark=1.0)
    assert scheduler.admit(budget=16, spare=6) == [], "c needs 5 of 6, and a and b will soon need one block each"
    assert by_id(scheduler.admit(budget=16, spare=7)) == [("c", 0, 16)], (
        "c needs 5 of 7, and one block each is left for a and b: that fits exactly"
    )
    alone = scheduler_with(CountingManager(usable=5), waiting=[request_of(20, name="c")], watermark=1.0)
    assert by_id(alone.admit(budget=16, spare=5)) == [("c", 0, 16)], (
        "nothing runs beside c, so nothing has to stay free: a request that fits into the pool must be able to start"
    )


@pytest.mark.task(4)
def test_the_watermark_counts_the_requests_admitted_in_this_step():
    scheduler = scheduler_with(
        CountingManager(usable=8), waiting=[request_of(4, name=name) for name in "abc"], watermark=1.0
    )
    assert by_id(scheduler.admit(budget=16, spare=4)) == [("a", 0, 4), ("b", 0, 4)], (
        "each needs 1 of 4 blocks. b leaves one free for a, which now runs; c would have to leave two, for a and b"
    )


@pytest.mark.task(4)
def test_the_cost_is_that_of_all_its_tokens_and_of_its_namespace():
    manager = CountingManager()
    again = request_of(4, name="a", outputs=[9, 8])
    again.namespace = "tenant"
    scheduler_with(manager, waiting=[again]).admit(budget=16, spare=8)
    assert manager.asked[-1:] == [([1, 2, 3, 4, 9, 8], 6, "tenant")], (
        "cost gets all known tokens (after a preemption the answer so far is among them), reserved_tokens and the "
        "request's namespace: lesson 8's manager looks for cached prefixes with them"
    )


@pytest.mark.task(4)
def test_tokens_that_already_have_kv_are_not_computed():
    manager = CountingManager(usable=8, cached=8)
    scheduler = scheduler_with(manager, waiting=[request_of(12, name="a")])
    assert by_id(scheduler.admit(budget=16, spare=3)) == [("a", 8, 12)], "allocate said that 8 of 12 tokens have KV"
    assert scheduler.running[0].num_cached_tokens == 8, "num_cached_tokens says how many tokens had KV on admission"


@pytest.mark.task(4)
def test_a_preempted_request_that_runs_again_keeps_its_first_num_cached_tokens():
    manager = CountingManager(usable=8, cached=8)
    request = request_of(12, name="a")
    request.num_cached_tokens, request.num_preemptions = 3, 1
    scheduler_with(manager, waiting=[request]).admit(budget=16, spare=8)
    assert (request.num_computed_tokens, request.num_cached_tokens) == (8, 3), (
        "8 tokens have KV now; num_cached_tokens is what was cached when the request was first admitted"
    )


@pytest.mark.task(4)
def test_a_request_told_to_wait_keeps_its_place_and_the_next_may_start():
    manager = CountingManager(held_back=6)
    scheduler = scheduler_with(manager, waiting=[request_of(6, name="a"), request_of(5, name="b")])
    assert by_id(scheduler.admit(budget=16, spare=8)) == [("b", 0, 5)], (
        "a should wait a step, b has nothing to wait for"
    )
    assert [r.id for r in scheduler.waiting] == ["a"], "a was told to wait and stays in the queue"
    assert set(manager.held) == {"b"}, "a request that waits holds nothing"
    manager.held_back = None
    assert by_id(scheduler.admit(budget=16, spare=6)) == [("a", 0, 6)], "one step later a has nothing to wait for"
    assert [r.id for r in scheduler.running] == ["a", "b"], "a arrived first and has kept its place"


@pytest.mark.task(4)
def test_blocks_for_a_request_told_to_wait_are_set_aside():
    manager = CountingManager(usable=7, held_back=20)
    waiting = [request_of(20, name="a"), request_of(12, name="b"), request_of(4, name="c")]
    assert by_id(scheduler_with(manager, waiting=waiting).admit(budget=32, spare=7)) == [], (
        "a waits a step and will need 5 of 7 blocks: set them aside; then b's 3 do not fit, and c must not overtake b"
    )


@pytest.mark.task(4)
def test_the_seat_and_watermark_of_a_request_told_to_wait_are_set_aside():
    waiting = [request_of(6, name="a"), request_of(5, name="b"), request_of(4, name="c")]
    scheduler = scheduler_with(CountingManager(held_back=6), waiting=list(waiting), max_num_seqs=2)
    assert by_id(scheduler.admit(budget=16, spare=8)) == [("b", 0, 5)], "one of the two seats is a's, so c has to wait"
    for spare, admitted in ((5, ["b"]), (4, [])):
        scheduler = scheduler_with(CountingManager(held_back=6), waiting=waiting[:2], watermark=1.0)
        assert [c.request.id for c in scheduler.admit(budget=16, spare=spare)] == admitted, (
            "2 blocks for a, 2 for b, and one left free for a, which will run beside b"
        )


@pytest.mark.task(4)
def test_with_whole_answers_promised_fewer_requests_are_admitted():
    waiting = [request_of(4, max_tokens=9, name=name) for name in "ab"]
    scheduler = scheduler_with(CountingManager(usable=5), waiting=waiting, reserve_answers=True)
    assert by_id(scheduler.admit(budget=16, spare=5)) == [("a", 0, 4)], "each needs 3 blocks for 4 + 9 - 1 tokens"


# --- recording a step


@pytest.mark.task(5)
def test_a_token_for_each_chunk_that_samples():
    manager = CountingManager()
    running = [decoding(manager, "a"), prefilling(manager, "b", 9, computed=0), prefilling(manager, "c", 6, computed=4)]
    scheduler = scheduler_with(manager, running=running)
    chunks = [Chunk(running[0], 4, 5, []), Chunk(running[1], 0, 4, []), Chunk(running[2], 4, 6, [])]
    new = scheduler.update(chunks, [Sampled(21, None), Sampled(22, None)])
    assert {name: s.token_id for name, s in new.items()} == {"a": 21, "c": 22}, (
        "b's chunk is not the last of its prompt, so the second token is c's"
    )
    assert [r.num_computed_tokens for r in running] == [5, 4, 6], "the tokens of each chunk have KV now"
    assert [r.output_ids for r in running] == [[9, 21], [], [22]]
    assert [entry for entry in manager.log if entry[0] == "commit"] == [
        ("commit", "a", [1, 2, 3, 4, 9]),
        ("commit", "b", [1, 2, 3, 4]),
        ("commit", "c", [1, 2, 3, 4, 5, 6]),
    ], "commit gets the request's token_ids, prompt and answer, and how many of them have KV: those before chunk.stop"


@pytest.mark.task(5)
@pytest.mark.parametrize(
    "max_tokens, token, reason",
    [(3, 5, None), (2, 5, "length"), (3, EOS, "stop"), (2, EOS, "stop")],
)
def test_an_answer_ends_with_its_stop_token_or_its_length(max_tokens, token, reason):
    manager = CountingManager()
    request = manager.holding(request_of(4, max_tokens, computed=4, outputs=[9]), 5)
    scheduler = scheduler_with(manager, running=[request])
    new = scheduler.update([Chunk(request, 4, 5, [])], [Sampled(token, None)])
    assert request.finish_reason == reason, (
        f"the answer has 2 of at most {max_tokens} tokens, and its stop token is {EOS}. "
        "A stop token is the reason even if it is also the last token allowed"
    )
    assert request.output_ids == [9, token], "the stop token is part of the answer"
    assert new == {"a": Sampled(token, None)}, "the last token of an answer is a new token too: readers wait for it"
    if reason:
        left = {*scheduler.requests, *(request.id for request in scheduler.running)}
        assert left == set(), "a request that has ended leaves the scheduler: finish"
        assert manager.log[-1] == ("free", "a", [1, 2, 3, 4, 9]), (
            "the last token was sampled, but its KV was never written"
        )


class Form(Anything):
    """A grammar in whose answers no stop id may end anything yet."""

    may_end = False

    def matcher(self):
        return self


@pytest.mark.task(5)
@pytest.mark.parametrize("max_tokens, reason", [(3, None), (2, "length")])
def test_a_stop_token_within_an_unfinished_form_does_not_end_it(max_tokens, reason):
    """What an answer must look like is a grammar, and the request knows how far it has come (`reason_to_end`)."""
    manager = CountingManager()
    request = Request("a", [1, 2, 3, 4], greedy(max_tokens, grammar=Form()), stop_ids=(EOS,))
    request.append(Sampled(9, None))
    request.num_computed_tokens = 4
    scheduler_with(manager, running=[manager.holding(request, 5)]).update(
        [Chunk(request, 4, 5, [])], [Sampled(EOS, None)]
    )
    assert request.finish_reason == reason, "a form that is not complete ends at no stop token: ask the request"


@pytest.mark.task(5)
def test_a_request_aborted_during_the_step_gets_no_token():
    manager = CountingManager()
    running = [decoding(manager, name) for name in "ab"]
    scheduler = scheduler_with(manager, running=running)
    chunks = [Chunk(request, 4, 5, []) for request in running]
    scheduler.finish(running[0], FinishReason.ABORT)
    new = scheduler.update(chunks, [Sampled(21, None), Sampled(22, None)])
    assert {name: s.token_id for name, s in new.items()} == {"b": 22}, "each token belongs to its own request"
    assert running[0].output_ids == [9], "a was aborted: it gets nothing more"
    assert running[0].finish_reason == "abort", "a was aborted: it keeps the reason"
    assert [entry[:2] for entry in manager.log] == [("free", "a"), ("commit", "b")], (
        "a was freed when it was aborted. It holds nothing now: do not commit, finish or free it again"
    )


@pytest.mark.parametrize("state", ["waiting", "mid-chunk", "decoding"])
def test_a_request_frees_everything_when_it_ends_in_any_state(state):
    manager = CountingManager()
    request = request_of(9, name="a") if state == "waiting" else None
    request = request or (prefilling(manager, "a", 9, 4) if state == "mid-chunk" else decoding(manager, "a"))
    queues = {"waiting": [request]} if state == "waiting" else {"running": [request]}
    scheduler = scheduler_with(manager, **queues)
    scheduler.finish(request, FinishReason.ABORT)
    assert manager.held == {}, f"a request that was {state} has ended and still holds {manager.held}"
    assert (scheduler.running, scheduler.waiting, scheduler.requests) == ([], [], {})


# --- which requests are accepted


def test_a_request_that_can_never_fit_is_refused_at_once():
    scheduler = scheduler_with(CountingManager(usable=8, block_size=4))
    with refused(UserError, "20 14 9 4 8"):
        scheduler.add(request_of(20, max_tokens=14))
    assert scheduler.requests == {} and scheduler.waiting == []
    scheduler.add(request_of(20, max_tokens=13))  # 32 tokens need KV: the last one does not


def test_an_id_in_use_is_refused():
    scheduler = scheduler_with()
    scheduler.add(request_of(3, name="a"))
    with refused(UserError, "'a'"):
        scheduler.add(request_of(5, name="a"))
    assert len(scheduler.waiting) == 1


def test_the_queue_is_first_come_first_served_or_by_priority():
    for policy, want in (("fcfs", ["a", "b", "c", "d"]), ("priority", ["c", "b", "d", "a"])):
        scheduler = scheduler_with(policy=policy)
        for name, priority in (("a", 5), ("b", 1), ("c", 0), ("d", 1)):
            scheduler.add(request_of(3, name=name, priority=priority))
        assert [r.id for r in scheduler.waiting] == want, f"{policy}: smaller numbers first; equals in order of arrival"


@pytest.mark.task(3)
def test_with_priorities_the_least_urgent_request_is_preempted():
    manager = CountingManager(usable=3)
    scheduler = scheduler_with(manager, policy="priority")
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        request = request_of(4, name=name, computed=4, outputs=[9], priority=priority)
        scheduler.add(manager.holding(request, 4))
    scheduler.running, scheduler.waiting = scheduler.waiting, []
    scheduler.make_room()
    assert [r.id for r in scheduler.running] == ["b"] and [r.id for r in scheduler.waiting] == ["c", "a"]


@pytest.mark.parametrize(
    "limits, values",
    [
        (dict(max_num_seqs=0), "max_num_seqs 0"),
        (dict(chunked_prefill_size=0), "chunked_prefill_size 0"),
        (dict(chunked_prefill_size=128.0), "chunked_prefill_size 128.0"),
        (dict(max_num_batched_tokens="512"), "max_num_batched_tokens '512'"),
        (dict(watermark=-1), "watermark -1"),
        (dict(watermark=float("nan")), "watermark nan"),
        (dict(max_num_seqs=64, max_num_batched_tokens=63), "max_num_batched_tokens 63 max_num_seqs 64"),
        (dict(policy="lifo"), "'lifo' fcfs priority"),
    ],
)
def test_invalid_limits_are_refused(limits, values):
    with refused(UserError, values):
        SchedulerConfig(**limits)


def test_a_request_derives_its_state_from_a_few_numbers():
    request = request_of(5, max_tokens=4, computed=5, outputs=[9])
    assert (request.num_uncomputed_tokens, request.is_prefilling, request.max_kv_tokens) == (1, False, 8)
    request.num_computed_tokens = 0
    assert request.num_uncomputed_tokens == 6 and request.is_prefilling, "after a preemption it prefills again"
    assert request_of(1).is_prefilling, "a prompt of one token is a prefill too"
    assert Scheduler(CountingManager()).config.policy == "fcfs" and greedy().max_tokens == 8
