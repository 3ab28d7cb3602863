"""Lesson 19. Which worker a prompt goes to: by its blocks and its namespace, as the policy of lesson 13 says."""

from array import array
from types import SimpleNamespace

from mini_engine.handover.transfers import Transfers
from mini_engine.handover.workers import PrefillWorkers


class Noting:
    """A policy that notes what it is asked, and chooses the last worker."""

    def __init__(self):
        self.asked, self.told = [], []

    def choose(self, keys, loads):
        self.asked.append((keys, loads))
        return max(loads)

    def sent(self, number, keys):
        self.told.append((number, keys))


def test_prompts_are_known_by_their_whole_blocks_and_by_their_namespace():
    policy = Noting()
    workers = PrefillWorkers(lambda: None, 0, None, policy, 4)
    workers.transfers = Transfers(6)
    assert workers.choose(array("i", range(9)), None) is None and not policy.asked, "there is no worker"
    workers.handles = {1: SimpleNamespace(), 2: SimpleNamespace()}
    workers.transfers.ask(2, 0, 3, 0)
    for namespace in (None, "a", "a"):
        assert workers.choose(array("i", range(9)), namespace) == 2
    workers.choose(array("i", range(4)), "a")
    workers.handles.clear()
    workers.close()
    (plain, loads), (first, _), (again, _), (shorter, _) = policy.asked
    assert loads == {1: 0.0, 2: 1.0} and len(plain) == 2, "two whole blocks of nine tokens"
    assert first == again and shorter == first[:1], "the same blocks have the same keys"
    assert not set(plain) & set(first), "what one namespace has computed is of no use to another"
    assert policy.told == [(2, keys) for keys, _ in policy.asked]
