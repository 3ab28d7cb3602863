"""Lesson 13. A lost replica's request: attempted again before the first item, never after it."""

import asyncio
import inspect

import pytest

from mini_engine.distributed.routing.retry import ReplicaLost, with_retries

pytestmark = pytest.mark.task(6)


class Attempts:
    """Answers, each a list of items and at its end an error to raise; notes which were begun and which were closed."""

    def __init__(self, *answers):
        self.answers, self.begun, self.closed = list(answers), 0, []

    async def __call__(self):
        number, self.begun = self.begun, self.begun + 1
        assert self.closed == list(range(number)), "the attempt before was not closed when this one began"
        try:
            for item in self.answers[number]:
                if isinstance(item, Exception):
                    raise item
                await asyncio.sleep(0)
                yield item
        finally:
            await asyncio.sleep(0)  # closing takes a moment, as over a network
            self.closed.append(number)


def answer_of(attempts, **options):
    """Return with_retries' generator. A body that is not written yet has no `yield`: it is a coroutine, and says so."""
    answer = with_retries(attempts, **options)
    if inspect.iscoroutine(answer):
        asyncio.run(answer)
    return answer


def read(attempts, **options):
    """Read the whole answer; return its items, and the error that ended it."""
    items = []

    async def reader():
        async for item in answer:
            items.append(item)

    answer = answer_of(attempts, **options)
    try:
        asyncio.run(asyncio.wait_for(reader(), 60))
    except Exception as error:
        return items, error
    return items, None


def test_an_answer_is_passed_on_as_it_is():
    attempts = Attempts(["a", None, "", "b"])
    assert read(attempts) == (["a", None, "", "b"], None), "every item, in order, whatever it is; and no error"
    assert attempts.begun == 1, "the first attempt succeeded"


def test_a_replica_that_is_lost_before_the_first_item_is_replaced():
    attempts = Attempts([ReplicaLost()], [ReplicaLost()], ["a", "b"])
    assert read(attempts) == (["a", "b"], None), "two replicas were lost before their first item, the third answered"
    assert attempts.begun == 3, "two attempts failed, the third succeeded"


@pytest.mark.parametrize("first", ["a", "", None, 0])
def test_after_the_first_item_nothing_is_sent_again(first):
    lost = ReplicaLost("replica 1 has ended")
    attempts = Attempts([first, lost], ["b", "c"])
    items, error = read(attempts)
    assert items == [first], "the reader has seen an item: a second answer would begin from the start, or be another"
    assert error is lost, "the reader is told that the replica was lost"
    assert attempts.begun == 1, "nothing is sent again"


def test_an_answer_without_items_is_complete():
    attempts = Attempts([], ["b"])
    assert read(attempts) == ([], None), "the first answer had no items: it has ended, it was not lost"
    assert attempts.begun == 1, "nothing is sent again"


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_after_the_last_attempt_the_error_is_passed_on(most):
    errors = [ReplicaLost(str(number)) for number in range(9)]
    attempts = Attempts(*([error] for error in errors))
    items, error = read(attempts, most=most)
    assert (items, attempts.begun) == ([], most), f"at most {most} attempts"
    assert error is errors[most - 1], "the last attempt's error"


def test_another_error_is_not_tried_again():
    fault = ValueError("a bad request is bad everywhere")
    attempts = Attempts([fault], ["a"])
    assert read(attempts) == ([], fault), "an error that is the request's own is passed on"
    assert attempts.begun == 1, "nothing is sent again"


def test_an_item_is_passed_on_before_the_next_one_is_there():
    asked = []

    async def slow():
        for item in ("a", "b"):
            asked.append(item)
            yield item

    async def reader():
        seen = []
        async for item in answer:
            seen.append((item, list(asked)))
        return seen

    answer = answer_of(slow)
    assert asyncio.run(reader()) == [("a", ["a"]), ("b", ["a", "b"])], "a stream is a stream, not a list at its end"


def test_when_the_reader_leaves_the_attempt_is_closed():
    attempts = Attempts(["a", "b", "c"])

    async def leave():
        assert await anext(answer) == "a"
        await answer.aclose()
        return list(attempts.closed)

    answer = answer_of(attempts)
    assert asyncio.run(leave()) == [0], "a replica that nobody reads must not go on"


def test_without_an_attempt_there_is_an_error():
    attempts = Attempts(["a"])
    items, error = read(attempts, most=0)
    assert isinstance(error, ValueError), "most = 0 allows no attempt: ValueError, and not an empty answer"
    assert (items, attempts.begun) == ([], 0), "nothing was sent"
