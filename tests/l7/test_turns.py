"""Lesson 7. One request with many answers does not keep the others waiting, and is not kept waiting for ever itself."""

import threading

import pytest

from mini_engine.cli.arguments import STEP_OPTIONS, add_fields, scheduler_config
from mini_engine.cli.parser import OneLineParser
from mini_engine.engine.jobs import Job
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.engine.turns import TURNS, give_place, in_turn
from tests.shared.service import Service, greedy

pytestmark = pytest.mark.reference  # no task is about this

BY_TURN = SchedulerConfig(max_num_seqs=4, policy="priority")
IDS = {"temperature": 0, "return_token_ids": True}


def test_a_further_answer_waits_for_some_that_come_later_but_not_for_all():
    jobs = [Job([1], SamplingParams())] * 4
    first, second = [job.priority for job in in_turn(jobs, 0)], [job.priority for job in in_turn(jobs, 1)]
    assert first[0] < second[0] < first[1] < second[1], "one answer each, then another one each"
    assert in_turn(jobs, 3 * TURNS + 1)[0].priority > first[3], "even the last one's turn comes"


def test_a_request_that_has_all_places_gives_one_up_to_the_next():
    """Two prompts with two answers each would otherwise keep all places until they end, which may take minutes."""
    many = {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 120} | IDS
    with Service(scheduler_config=BY_TURN) as service:
        large = []
        asking = threading.Thread(target=lambda: large.append(service.post("/v1/completions", many)))
        asking.start()
        service.wait_until("all places are taken", lambda: service.worker.num_running == 4)
        found = service.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 20} | IDS)
        assert service.worker.num_open == 4, "it was served although all four answers were still running"
        assert found.body["choices"][0]["token_ids"] == greedy((1, 2), 20)
        text = service.metrics.text().decode()
        assert float(text.split("\nmini_engine_preemptions_total ")[1].split()[0]) == 1, "one place, given up once"
        asking.join()
        expected = [greedy(tuple(prompt), 120) for prompt in many["prompt"] for _ in range(2)]
        assert [choice["token_ids"] for choice in large[0].body["choices"]] == expected, (
            "what gave way is finished later"
        )
        service.wait_until_idle()


def test_first_come_first_served_gives_no_place_up():
    with Service(scheduler_config=SchedulerConfig(max_num_seqs=1)) as service:
        engine = service.engine
        for index, priority in enumerate((5, 0)):
            engine.add_request(f"r{index}", [1, 2], SamplingParams(max_tokens=4), priority)
        engine.step()
        assert give_place(engine.scheduler) == 0 and len(engine.scheduler.running) == 1


@pytest.mark.parametrize(("size", "reserve_answers", "given"), [(20, False, 1), (190, False, 0), (20, True, 0)])
def test_a_place_is_given_up_only_to_a_request_that_can_start_there(size, reserve_answers, given):
    """Of 60 blocks of 4 tokens, `a` holds 15 and `b` 8: with the place of `b`, 45 are free."""
    config = SchedulerConfig(max_num_seqs=2, policy="priority", watermark=0, reserve_answers=reserve_answers)
    with Service(num_blocks=61, scheduler_config=config) as service:
        engine = service.engine
        engine.add_request("a", [1] * 60, SamplingParams(max_tokens=4), 0)
        engine.add_request("b", [2] * 30, SamplingParams(max_tokens=4), 8)
        engine.step()
        engine.add_request("c", [3] * size, SamplingParams(max_tokens=2), 1)
        assert len(engine.scheduler.running) == 2
        assert give_place(engine.scheduler) == given, "a request is preempted only for one that can start in its place"


def test_a_request_that_gave_its_place_up_keeps_the_next_one_until_it_has_caught_up():
    """Else a long prompt would begin again for each client that comes: the one before it gives way instead."""
    config = SchedulerConfig(3, 16, 4, policy="priority")
    with Service(scheduler_config=config) as service:
        scheduler = service.engine.scheduler
        own = SamplingParams(max_tokens=9, ignore_eos=True)
        a, b, c = (service.engine.add_request(name, [token] * 40, own, 20) for token, name in enumerate("abc", 1))
        service.engine.step()
        assert give_place(scheduler) == 0, "none waits"
        scheduler.preempt(c)
        service.engine.step()
        assert scheduler.running == [a, b, c] and c.is_prefilling
        first = service.engine.add_request("first", [2], SamplingParams(max_tokens=90, ignore_eos=True), 0)
        assert (give_place(scheduler), c.num_preemptions, b.num_preemptions) == (1, 1, 1)
        service.engine.step()
        assert scheduler.running == [first, a, c]
        service.engine.add_request("second", [2], SamplingParams(max_tokens=90, ignore_eos=True), 0)
        assert (give_place(scheduler), c.num_preemptions, a.num_preemptions) == (1, 1, 1)
        while c.is_prefilling:
            service.engine.step()
        assert c in scheduler.running and c.output_ids
        service.engine.add_request("third", [2], SamplingParams(max_tokens=90, ignore_eos=True), 0)
        assert (give_place(scheduler), c.num_preemptions) == (1, 2), "it has a token more than before"


def test_the_server_s_scheduler_goes_by_turns():
    parser = OneLineParser()
    add_fields(parser, SchedulerConfig, STEP_OPTIONS)
    assert scheduler_config(parser.parse_args([])).policy == "priority"
