"""Lesson 7. A slow client and a failing engine, over real sockets: the others are served as if nothing were."""

import threading
import time

import pytest

from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.worker import Job
from tests.shared.service import LONG, PATIENCE, Service, greedy, read_answer, unchunked


def in_time(call, while_true=lambda: True):
    """What `call` gives, in a thread, so that a server that hangs fails the test; None if it does."""
    found, end = [], time.monotonic() + PATIENCE
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    while thread.is_alive() and while_true() and time.monotonic() < end:
        thread.join(0.05)
    return found[0] if found else None


SHORT = {"prompt": [1, 2], "max_tokens": 20, "temperature": 0, "return_token_ids": True}
WAITS = "a reader waits for another that does not read: give each a queue of its own that is never full"


def test_a_reader_that_is_stuck_holds_up_no_other(service: Service):
    stuck = service.worker.submit_sync([Job([5, 6, 7], SamplingParams(temperature=0, max_tokens=100))])
    found = in_time(lambda: service.post("/v1/completions", SHORT))
    assert [token for _, delta in stuck for token in delta.token_ids] == greedy((5, 6, 7), 100), "late, but all of it"
    assert found, WAITS
    assert found.body["choices"][0]["token_ids"] == greedy((1, 2), 20)
    service.wait_until_idle()


@LONG
@pytest.mark.ci
def test_a_client_that_does_not_read_holds_up_no_other(service: Service):
    asked = SHORT | {"prompt": [5, 6, 7], "max_tokens": 250, "n": 4, "stream": True}
    slow = service.connect(asked, receive_buffer=2048)  # and reads nothing
    service.wait_until("it runs", lambda: service.worker.num_running == 4)
    found = in_time(lambda: service.post("/v1/completions", SHORT))
    assert found, WAITS
    assert found.body["choices"][0]["token_ids"] == greedy((1, 2), 20)
    service.wait_until("the slow one's answers were computed to their ends", lambda: service.worker.num_open == 0)
    with slow, slow.makefile("rb") as response:
        head, _, content = response.read().partition(b"\r\n\r\n")
    assert b"200 OK" in head
    token_ids = read_answer(unchunked(content).decode())["token_ids"]
    assert sorted(token_ids) == sorted(greedy((5, 6, 7), 250) * 4), "all of it was kept for him"


def test_the_server_outlives_an_engine_that_fails(service: Service):
    schedule, left = service.engine.scheduler.schedule, [1]

    def fails_once():
        if left:
            left.pop()
            raise RuntimeError("the books do not balance")
        return schedule()

    service.engine.scheduler.schedule = fails_once
    body = {"prompt": [1, 2], "max_tokens": 2}
    found = in_time(lambda: service.post("/v1/completions", body), lambda: service.worker.is_alive)
    assert found and service.worker.is_alive, (
        "the engine's thread has ended, and every client waits for ever: catch the error, tell the clients, go on"
    )
    assert found.status == 500 and "the books do not balance" in found.body["error"]["message"]
    assert service.post("/v1/completions", body).status == 200, "the next one is served as usual"
    service.wait_until_idle()


@pytest.mark.reference
def test_a_server_that_runs_into_an_unwritten_task_is_not_waited_for(service: Service, monkeypatch):
    def unwritten(*_):
        raise NotImplementedError("Lesson 8, task 7: Begin with the cached prefix")

    monkeypatch.setattr(service.engine.scheduler, "schedule", unwritten)
    with pytest.raises(NotImplementedError, match="task 7"):
        service.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2})
