"""Lesson 19. Two processes, real ones: tokens are those of one process and of Hugging Face, and nothing is left."""

import itertools

import pytest
import torch

from mini_engine import LLM
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.handover.opening import workers_of
from tests.l18.ends import wait_for
from tests.l19.ends import (
    ASKED,
    BLOCK,
    CHUNK,
    NEW,
    OPTIONS,
    PROMPTS,
    answers,
    ask,
    check_nothing_is_held,
    drain,
    events,
    expected,
    receiving,
)
from tests.support import hf_greedy

nightly = pytest.mark.nightly
names = itertools.count()


def opened(name="pocket", **options):
    return LLM(shipped_checkpoint(name), dtype="float32", device="cpu", **OPTIONS | ASKED | options)


def wanted(prompts=PROMPTS, name="pocket"):
    return [expected(name, tuple(prompt)) for prompt in prompts]


def fresh():
    return f"{next(names)}-"


def moved(before, after):
    """Return what has happened between two counts."""
    return {name: after[name] - before[name] for name in after}


class Fills:
    """Notes each `Filled` that arrives: how many buffers of its transfer are complete, and how many it has."""

    def __init__(self, transfers):
        self.noted, self.fill, self.transfers = [], transfers.fill, transfers
        transfers.fill = self

    def __call__(self, sender, transfer_id, num_buffers):
        self.noted.append((num_buffers, len(self.transfers.of_id[transfer_id].buffers)))
        self.fill(sender, transfer_id, num_buffers)

    def stop(self):
        self.transfers.fill = self.fill


@pytest.mark.ci
@pytest.mark.reference
def test_a_worker_s_k_and_v_give_the_same_tokens():
    """One fast test of everything at once; those below take it apart."""
    with opened() as llm:
        fills = Fills(receiving(llm.engine).transfers)
        requests = ask(llm.engine, PROMPTS[-1:])
        drain(llm.engine)
        assert [request.output_ids for request in requests] == wanted(PROMPTS[-1:])
        assert requests[0].num_cached_tokens == (len(PROMPTS[-1]) - 1) // BLOCK * BLOCK, (
            "only its end was computed here"
        )
        done, total = fills.noted[0]
        assert done <= CHUNK // BLOCK < total, "the first chunk's blocks arrived while the others were being computed"
        assert [count for count, _ in fills.noted] == sorted({count for count, _ in fills.noted})
        check_nothing_is_held(llm.engine)
        workers = workers_of(llm.engine)
        processes = [handle.process for handle in workers.handles.values()]
    assert not any(process.is_alive() for process in processes), "workers end with the LLM"


@pytest.fixture(scope="module")
def llm():
    with opened() as llm:
        yield llm


@pytest.fixture
def engine(llm):
    """An engine whose caches are empty on the receiver's side; on the sender's they are not."""
    llm.engine.scheduler.manager.coordinator.clear()
    yield llm.engine
    check_nothing_is_held(llm.engine)


@nightly
def test_alone(engine):
    for prompt in PROMPTS:
        before = events(engine)
        assert answers(engine, [prompt], name=fresh()) == wanted([prompt])
        found = moved(before, events(engine))
        assert (found["transfers"], found["fallbacks"], found["losses"]) == (1, 0, 0)
        assert found["tokens"] == (len(prompt) - 1) // BLOCK * BLOCK and found["bytes"]


@nightly
def test_tokens_are_hugging_face_s(engine):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(shipped_checkpoint("pocket"), dtype=torch.float32).eval()
    found = theirs.generation_config.eos_token_id
    ends = found if isinstance(found, list) else [found]
    want = [hf_greedy(theirs, list(prompt), NEW) for prompt in PROMPTS]
    want = [ids[: next((i + 1 for i, token in enumerate(ids) if token in ends), NEW)] for ids in want]
    assert answers(engine, name=fresh()) == want


@nightly
def test_mixed_with_running_answers(engine):
    first = ask(engine, PROMPTS[:1], 40, fresh())
    while not first[0].output_ids:
        engine.step()
    others = ask(engine, PROMPTS[1:], name=fresh())
    ahead = len(first[0].output_ids)
    while not any(request.output_ids for request in others):
        engine.step()
    assert first[0].is_finished or len(first[0].output_ids) > ahead, "a running answer goes on meanwhile"
    drain(engine)
    assert [request.output_ids for request in others] == wanted(PROMPTS[1:])
    assert first[0].output_ids == expected("pocket", PROMPTS[0], 40)


@nightly
def test_with_prefixes_cached_on_both_sides(engine):
    short, long = PROMPTS[2][:100], PROMPTS[2]
    assert answers(engine, [short], name=fresh()) == wanted([short])
    before = events(engine)
    requests = ask(engine, [long], name=fresh())
    drain(engine)
    assert [requests[0].output_ids] == wanted([long])
    found = moved(before, events(engine))
    assert 0 < found["tokens"] < len(long) - 90, "only what the receiver lacks was handed over"
    before = events(engine)
    assert answers(engine, [long], name=fresh()) == wanted([long])
    assert moved(before, events(engine))["transfers"] == 0, "the receiver has all of it"


@nightly
def test_twins_are_computed_once(engine):
    before = events(engine)
    assert answers(engine, [PROMPTS[1], PROMPTS[1]], name=fresh()) == wanted([PROMPTS[1], PROMPTS[1]])
    assert moved(before, events(engine))["transfers"] == 1


@nightly
def test_a_request_that_is_cancelled_on_its_way_frees_both_sides(engine):
    long = (*PROMPTS[2], *PROMPTS[1], *PROMPTS[0][: next(names) + 1])  # new to the sender's cache, at its end
    [request] = ask(engine, [long], name=fresh())
    transfers = receiving(engine).transfers
    while not transfers.of_id:
        engine.step()
    assert engine.abort(request.id)
    wait_for("the sender has ended", lambda: not transfers.of_id)
    check_nothing_is_held(engine)
    assert answers(engine, [long], name=fresh()) == wanted([long])


@nightly
def test_a_stage_that_is_too_small_hands_over_in_part():
    with opened() as llm:
        buffer_bytes = receiving(llm.engine).stage.buffer_bytes
        num_extra = receiving(llm.engine).extras.num_buffers(0, 6)
    with opened(handover_bytes=(6 + num_extra) * buffer_bytes) as llm:
        assert answers(llm.engine) == wanted()
        found = events(llm.engine)
        assert 0 < found["tokens"] < sum(map(len, PROMPTS)) - 3 * BLOCK, "no prompt fits into the stage"
        check_nothing_is_held(llm.engine)


@nightly
def test_with_preemption_in_a_tiny_pool():
    small = SchedulerConfig(chunked_prefill_size=CHUNK, watermark=0)
    with opened(num_blocks=56, scheduler_config=small) as llm:
        long = {"max_tokens": 60, "ignore_eos": True}
        assert answers(llm.engine, **long) == [expected("pocket", prompt, **long) for prompt in PROMPTS]
        assert llm.engine.scheduler.num_preemptions > 0, "the pool is small enough"
        check_nothing_is_held(llm.engine)


@nightly
def test_two_workers_share_the_prompts():
    with opened(prefill_workers=2) as llm:
        asked = []
        send = workers_of(llm.engine).send
        workers_of(llm.engine).send = lambda sender, message: (asked.append(sender), send(sender, message))
        assert answers(llm.engine) == wanted()
        assert set(asked) == {1, 2}, "the policy chooses the one with less to do"
        check_nothing_is_held(llm.engine)


@nightly
def test_a_block_of_one_token():
    """The token behind the last block is a block, too: a state must not be taken behind that one."""
    with opened("pocket-hybrid", block_size=1, num_blocks=500) as llm:
        assert answers(llm.engine) == wanted(name="pocket-hybrid")
        assert events(llm.engine)["fallbacks"] == 0
        check_nothing_is_held(llm.engine)


@nightly
def test_workers_are_replaced_one_by_one():
    with opened() as llm:
        workers = workers_of(llm.engine)
        [old] = workers.handles.values()
        requests = ask(llm.engine)
        llm.engine.step()
        workers.replace_all()
        assert list(workers.handles) == [2]
        drain(llm.engine)
        assert [request.output_ids for request in requests] == wanted()
        wait_for("the old one has ended", lambda: not old.process.is_alive())
        assert answers(llm.engine, [PROMPTS[0][1:]], name="new") == wanted([PROMPTS[0][1:]])
        assert events(llm.engine)["losses"] == 0
        check_nothing_is_held(llm.engine)
