"""Lesson 13. The books between the policy and Ray Serve's router, in numbers: loads, and reports that are read once."""

from mini_engine.distributed.replicas.loads import Routing, make_policy
from mini_engine.distributed.routing.policy import RoundRobin

PROMPT = [b"system", b"a", b"b"]


class Recorder(RoundRobin):
    """A policy that remembers what it was told."""

    def __init__(self):
        super().__init__()
        self.asked, self.told, self.corrected = [], [], []

    def choose(self, keys, loads):
        self.asked.append(dict(loads))
        return super().choose(keys, loads)

    def sent(self, replica, keys):
        self.told.append((replica, keys))

    def found(self, replica, keys, num_found):
        self.corrected.append((replica, keys, num_found))


def test_a_request_counts_from_the_moment_it_is_chosen_for_until_it_ends():
    routing = Routing(Recorder())
    assert [routing.choose(name, PROMPT, ["x", "y"]) for name in ("1", "2", "3")] == ["x", "y", "x"]
    routing.ended("1")
    routing.ended("never seen")
    routing.choose("4", PROMPT, ["x", "y"])
    zero, one = {"x": 0.0, "y": 0.0}, {"x": 1.0, "y": 0.0}
    assert routing.policy.asked == [zero, one, {"x": 1.0, "y": 1.0}, {"x": 1.0, "y": 1.0}]


def test_a_request_that_is_chosen_for_again_counts_once():
    routing = Routing(Recorder())
    routing.choose("1", PROMPT, ["x", "y"])
    routing.choose("1", PROMPT, ["x", "y"])
    assert routing.policy.asked[1] == {"x": 0.0, "y": 0.0}, "the first choice was not used: Ray could not send it there"


def test_two_hundred_that_come_together_are_spread():
    routing = Routing(make_policy("score", 1.0, 1000))
    routing.choose("0", PROMPT, ["x", "y"])
    routing.sent("0", PROMPT, "x")
    chosen = [routing.choose(str(number), PROMPT, ["x", "y"]) for number in range(1, 200)]
    assert 80 < chosen.count("x") < 150, f"{chosen.count('x')} of 199 went to one of two replicas"


def test_the_policy_hears_where_a_prompt_went_and_only_of_requests_that_are_open():
    routing = Routing(Recorder())
    routing.choose("1", PROMPT, ["x", "y"])
    routing.sent("1", PROMPT, "x")
    routing.sent("a broadcast", PROMPT, "y")
    assert routing.policy.told == [("x", PROMPT)]


def test_reports_correct_the_policy_each_once():
    routing = Routing(Recorder())
    routing.learn("x", [(1, PROMPT, 0), (2, PROMPT[:1], 1)])
    routing.learn("x", [(1, PROMPT, 0), (2, PROMPT[:1], 1), (3, PROMPT, 2)])
    routing.learn("y", [(1, PROMPT, 3)])
    assert routing.policy.corrected == [
        ("x", PROMPT, 0), ("x", PROMPT[:1], 1), ("x", PROMPT, 2), ("y", PROMPT, 3)
    ]  # fmt: skip


def test_a_report_reaches_what_the_score_believes():
    routing = Routing(make_policy("score", 1.0, 1000))
    routing.choose("1", [b"z"], ["x", "y"])
    routing.learn("y", [(1, PROMPT, 3)])
    assert routing.choose("2", PROMPT, ["x", "y"]) == "y", "replica y has said that it has this prompt"
