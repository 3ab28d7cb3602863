"""Lesson 19. The receiver's view of workers, without processes: when buffers are free, and when another one starts."""

from array import array
from types import SimpleNamespace

import pytest

from mini_engine.base.errors import UserError
from mini_engine.handover.handle import Handle
from mini_engine.handover.protocol import Ask, Cancel, Ended, Filled
from mini_engine.handover.transfers import Transfers
from mini_engine.handover.workers import MOST_LOSSES, PrefillWorkers


class Dying:
    """A worker's handle; `on_kill` happens while it is being killed."""

    def __init__(self, number=1, on_kill=lambda: None):
        self.number, self.is_lost, self.num_held, self.on_kill = number, False, 0, on_kill
        self.sent, self.is_dead = [], False

    def send(self, message):
        self.sent.append(message)

    def kill(self):
        self.on_kill()
        self.is_dead = True


class Noting:
    """A policy that notes what it is asked, and chooses the last worker."""

    def __init__(self):
        self.asked, self.told = [], []

    def choose(self, keys, loads):
        self.asked.append((keys, loads))
        return max(loads)

    def sent(self, number, keys):
        self.told.append((number, keys))


@pytest.fixture
def workers():
    workers = PrefillWorkers(lambda: None, 0, None, Noting(), 4)
    workers.transfers = Transfers(6)
    workers.num_added = 0
    workers._replace_lost = lambda: setattr(workers, "num_added", workers.num_added + 1)
    yield workers
    workers.handles.clear()
    workers.close()


def states(workers):
    return sorted({state.value for state in workers.transfers.buffers.states})


def test_a_worker_is_dead_before_its_buffers_are_free(workers):
    seen = []

    def during():
        workers.send(1, Cancel(7))  # the engine's thread goes on meanwhile
        seen.append(states(workers))

    workers.handles[1] = Dying(1, during)
    workers.transfers.ask(1, 0, 6, 0)
    workers._lose(workers.handles[1], "has ended")
    assert seen == [["lent"]], (
        "a worker that sent no heartbeat may wake up and write: it is killed before its buffers are free"
    )
    assert states(workers) == ["free"] and not workers.handles


def test_what_is_asked_while_a_worker_is_being_killed_ends_too(workers):
    def during():
        transfer = workers.transfers.ask(1, 0, 2, 0)
        workers.send(1, Ask(transfer.id, array("i", [1]), None, 0, 2, transfer.buffers))

    workers.handles[1] = Dying(1, during)
    workers._lose(workers.handles[1], "has ended")
    assert states(workers) == ["free"]
    [transfer] = workers.transfers.of_id.values()
    assert transfer.has_ended and not transfer.is_open, "no request waits for it"


def test_what_is_asked_of_a_worker_that_is_gone_ends_at_once(workers):
    transfer = workers.transfers.ask(9, 0, 2, 0)
    workers.send(9, Ask(transfer.id, array("i", [1]), None, 0, 2, transfer.buffers))
    assert transfer.has_ended and states(workers) == ["free"]


def test_a_worker_is_lost_once(workers):
    handle = workers.handles[1] = Dying()
    for why in ("has ended", "sent no heartbeat for 5 s"):
        workers._lose(handle, why)
    assert workers.num_losses == 1


class Pauses:
    """An event that is never set, or is after so many pauses. It notes how long each of them would have been."""

    def __init__(self, most=99):
        self.seconds, self.most = [], most

    def wait(self, seconds):
        self.seconds.append(seconds)
        return self.is_set()

    def is_set(self):
        return len(self.seconds) > self.most

    def set(self):
        pass


def starting(workers, *outcomes):
    """Let a worker's start end like this: with an error, or with a handle that takes prompts."""
    left = list(outcomes)

    def start():
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        workers.handles[outcome.number] = outcome

    workers.num_workers, workers.closed, workers._add_new = 1, Pauses(), start
    return left


ERRORS = [UserError("no memory"), OSError(11, "no process"), RuntimeError("the pipe broke"), MemoryError()] * 3


def test_a_worker_that_cannot_start_is_tried_again_after_growing_pauses(workers, caplog):
    left = starting(workers, *ERRORS, Dying(7))
    PrefillWorkers._replace_lost(workers)
    assert not left and list(workers.handles) == [7] and workers.num_away == 0
    assert workers.closed.seconds == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60], "doubled, up to a minute"
    assert len(caplog.records) == len(ERRORS), "each failure is a line"


def test_nothing_is_started_for_a_place_that_was_taken_meanwhile(workers):
    left = starting(workers, *ERRORS)
    workers.handles[5] = Dying(5)  # after SIGHUP, for example
    PrefillWorkers._replace_lost(workers)
    assert len(left) == len(ERRORS) and workers.num_away == 0


def test_a_server_that_ends_waits_for_no_start(workers):
    left = starting(workers, *ERRORS)
    workers.closed.most = 2
    PrefillWorkers._replace_lost(workers)
    assert len(left) == len(ERRORS) - 2 and workers.num_away == 1


@pytest.mark.parametrize(("losses", "pause"), [(1, 0), (2, 0), (3, 1), (4, 2), (5, 4), (40, 60)])
def test_workers_that_end_again_and_again_start_after_growing_pauses(workers, losses, pause):
    starting(workers, Dying(9))
    workers.losses_in_a_row = losses
    PrefillWorkers._replace_lost(workers)
    assert workers.closed.seconds == [pause]


def test_losses_in_a_row_are_counted(workers):
    for number in range(1, MOST_LOSSES + 1):
        handle = workers.handles[number] = Dying(number)
        transfer = workers.transfers.ask(number, 0, 2, 0)
        workers._note(handle, Filled(transfer.id, 1))
        workers._lose(handle, "has ended")
    assert workers.num_losses == workers.losses_in_a_row == MOST_LOSSES, "its transfers were never whole"
    assert wait_for_threads(workers, MOST_LOSSES) == MOST_LOSSES, "each is replaced, sooner or later"


def test_a_whole_transfer_begins_the_row_again(workers):
    for number in range(1, MOST_LOSSES + 2):
        handle = workers.handles[number] = Dying(number)
        transfer = workers.transfers.ask(number, 0, 1, 0)
        workers._note(handle, Filled(transfer.id, 1))
        workers._note(handle, Ended(transfer.id))
        workers.transfers.take(transfer)
        workers._lose(handle, "has ended")
    assert workers.losses_in_a_row == 1


def wait_for_threads(workers, count):
    """Return how many workers have been started, once `count` threads have had the time to."""
    import threading

    for thread in threading.enumerate():
        if thread.name == "prefill-start":
            thread.join(60)
    return workers.num_added


def test_buffers_that_are_not_its_own_end_a_worker(workers):
    words = iter([Filled(5, 1)])
    handle = workers.handles[1] = Dying()
    handle.pipe = SimpleNamespace(recv=lambda: next(words))
    workers._hear(handle)
    assert handle.is_dead and workers.num_losses == 1, (
        "it has broken the protocol: nothing that it says can be believed"
    )


def test_workers_that_cannot_be_replaced_stay(workers):
    old, new = Dying(1), Dying(2)
    new.shake_hands = lambda layout: 1 / 0
    workers.handles, workers.layout, workers._start = {1: old}, object(), lambda: new
    with pytest.raises(ZeroDivisionError):
        workers.replace_all()
    assert workers.handles == {1: old} and not old.sent and new.is_dead


def test_prompts_are_known_by_their_whole_blocks_and_by_their_namespace(workers):
    policy = workers.policy
    assert workers.choose(array("i", range(9)), None) is None and not policy.asked, "there is no worker"
    workers.handles = {1: Dying(1), 2: Dying(2)}
    workers.transfers.ask(2, 0, 3, 0)
    for namespace in (None, "a", "a"):
        assert workers.choose(array("i", range(9)), namespace) == 2
    workers.choose(array("i", range(4)), "a")
    (plain, loads), (first, _), (again, _), (shorter, _) = policy.asked
    assert loads == {1: 0.0, 2: 1.0} and len(plain) == 2, "two whole blocks of nine tokens"
    assert first == again and shorter == first[:1], "the same blocks have the same keys"
    assert not set(plain) & set(first), "what one namespace has computed is of no use to another"
    assert policy.told == [(2, keys) for keys, _ in policy.asked]


def test_a_start_that_stands_still_is_given_up():
    handle = object.__new__(Handle)
    handle.pipe = SimpleNamespace(poll=lambda seconds: False)
    handle.seconds_silent = lambda: 5.0
    assert handle._first_words().why == "it sent no heartbeat for 5 s"
