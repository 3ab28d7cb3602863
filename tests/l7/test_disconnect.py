"""Lesson 7. A client that goes away takes its work with it: cancelled, cleaned up, its blocks free within a step."""

import asyncio

import pytest

from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.server.disconnect import ClientGone, unless_gone
from tests.shared.service import PATIENCE, Service

ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 480, "temperature": 0}


def client(*messages, then_stays=True):
    """ASGI's receive: these messages, and then nothing more, or that the client has gone."""
    left = list(messages)

    async def receive():
        await asyncio.sleep(0)
        if left:
            return left.pop(0)
        if then_stays:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return receive


@pytest.mark.task(2)
def test_work_that_ends_is_the_result():
    async def work():
        return 42

    assert asyncio.run(asyncio.wait_for(unless_gone(client(), work()), PATIENCE)) == 42, (
        "what the work returns is the result"
    )


@pytest.mark.task(2)
def test_work_that_is_done_when_the_client_goes_is_the_result():
    async def serve():
        done = asyncio.Event()

        async def work():
            done.set()
            return 42

        async def leaves_then():
            await done.wait()
            return {"type": "http.disconnect"}

        try:
            return await unless_gone(leaves_then, work())
        except ClientGone:
            return "ClientGone"

    found = asyncio.run(asyncio.wait_for(serve(), PATIENCE))
    assert found == 42, (
        f"{found}: the client went right after the work was done. The work came first: its result counts"
    )


@pytest.mark.task(2)
def test_an_error_in_the_work_is_the_caller_s():
    async def work():
        raise KeyError("of the work")

    with pytest.raises(KeyError, match="of the work"):
        asyncio.run(asyncio.wait_for(unless_gone(client(), work()), PATIENCE))


@pytest.mark.task(2)
def test_the_work_of_a_client_that_goes_is_cancelled_and_has_cleaned_up():
    state = []

    async def work():
        try:
            for _ in range(1000):  # turns of the loop; a client that has gone is noticed in a few
                await asyncio.sleep(0)
            state.append("went on to its end")
        finally:
            await asyncio.sleep(0.02)
            state.append("cleaned up")

    async def serve():
        receive = client({"type": "http.request", "body": b"", "more_body": False}, then_stays=False)
        try:
            await unless_gone(receive, work())
        except ClientGone:
            return [*state, "ClientGone"]
        return state

    found = asyncio.run(asyncio.wait_for(serve(), PATIENCE))
    assert "went on to its end" not in found, f"{found}: the client has gone, but its work went on: cancel it"
    assert found == ["cleaned up", "ClientGone"], (
        f"{found}: cancel the work, wait until it has ended (cleaning up may take a while), then raise ClientGone"
    )


@pytest.mark.task(2)
def test_nothing_is_left_running():
    async def serve():
        before = len(asyncio.all_tasks())
        await unless_gone(client(), asyncio.sleep(0))
        return len(asyncio.all_tasks()) - before

    assert asyncio.run(asyncio.wait_for(serve(), PATIENCE)) == 0, (
        "the task that waits for the client to go must end too"
    )


@pytest.mark.task(2)
def test_a_caller_that_is_cancelled_cancels_the_work():
    state, begun = [], asyncio.Event()

    async def work():
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)
            state.append("cleaned up")

    async def serve():
        serving = asyncio.create_task(unless_gone(client(), work()))
        waiting = asyncio.create_task(begun.wait())
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        await asyncio.wait([serving], timeout=PATIENCE)
        if not serving.cancelled() and isinstance(serving.exception(), NotImplementedError):
            raise serving.exception()  # not written yet
        return [*state, "cancelled" if serving.cancelled() else "went on"]

    found = asyncio.run(serve())
    assert found == ["cleaned up", "cancelled"], (
        f"{found}: cancelling unless_gone must cancel the work too; it has ended before the cancellation goes on"
    )


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_hangs_up_is_aborted_and_its_blocks_are_free(service: Service, stream):
    connection = service.connect(ENDLESS | {"stream": stream})
    service.wait_until("it runs", lambda: service.blocks_held > 2)
    connection.close()
    service.wait_until_idle()
    text = service.metrics.text().decode()
    assert 'mini_engine_requests_total{finish_reason="abort"} 1.0' in text, "the client hung up, and was not aborted"
    assert 'finish_reason="length"' not in text, "it was computed to its end, for nobody"


def test_a_client_that_hangs_up_while_it_waits_is_taken_out_of_the_queue():
    one_by_one = SchedulerConfig(reserve_answers=True)  # so that the second waits from the beginning
    with Service(num_blocks=126, scheduler_config=one_by_one) as service:  # room for one of them
        first = service.connect(ENDLESS | {"stream": True})
        service.wait_until("the first runs", lambda: service.worker.num_running == 1)
        second = service.connect(ENDLESS | {"prompt": [9] * 20, "stream": True, "ignore_eos": True})
        service.wait_until("the second waits", lambda: len(service.engine.scheduler.waiting) == 1)
        [waiting] = service.engine.scheduler.waiting
        second.close()
        service.wait_until("the second has left", lambda: waiting.is_finished)
        assert waiting.finish_reason == "abort", f"{waiting.finish_reason}: the client hung up, and was not aborted"
        first.close()
        service.wait_until_idle()
