"""Lesson 13. The score: what is known of a prompt against how busy a replica is; numbers only."""

import pytest

from mini_engine.routing.policy import PrefixScore, RoundRobin

PROMPT = ["system", "a", "b", "c"]


def policy_that_sent(*sent, beta=1.0, capacity=100):
    """A policy that has sent prompts to replicas: (replica, keys) each."""
    policy = PrefixScore(beta, capacity)
    for replica, keys in sent:
        policy.choose(keys, {"x": 0, "y": 0, "z": 0})
        policy.sent(replica, keys)
    return policy


def test_the_score_is_the_share_that_is_known_minus_the_load_above_the_mean():
    policy = policy_that_sent(("x", PROMPT[:3]), beta=0.5)
    scores = policy.scores(PROMPT, {"x": 9.0, "y": 3.0, "z": 0.0})
    assert scores == pytest.approx({"x": 3 / 4 - 0.5 * 5 / 4, "y": 0.5 * 1 / 4, "z": 0.5 * 4 / 4})


def test_below_a_mean_load_of_one_the_load_counts_in_requests():
    policy = policy_that_sent(("x", ["other"]))
    scores = policy.scores(PROMPT, {"x": 1.0, "y": 0.0, "z": 0.0})
    assert scores["x"] == pytest.approx(-2 / 3), "divided by max(1, mean): a single request is no overload"


def test_a_known_prompt_goes_where_it_is_known():
    policy = policy_that_sent(("y", PROMPT))
    assert policy.choose(PROMPT, {"x": 2.0, "y": 2.0, "z": 2.0}) == "y"


def test_a_busy_replica_loses_even_a_prompt_that_it_knows():
    policy = policy_that_sent(("y", PROMPT))
    assert policy.choose(PROMPT, {"x": 0.0, "y": 12.0, "z": 0.0}) != "y", "beta 1: a load of 3 times the mean costs 2"


def test_with_beta_0_load_is_ignored():
    policy = policy_that_sent(("y", PROMPT[:1]), beta=0.0)
    assert policy.choose(PROMPT, {"x": 0.0, "y": 1000.0, "z": 0.0}) == "y", "pure affinity: this is the pile-up"


def test_of_equal_scores_the_least_loaded_wins_then_the_one_that_holds_least():
    policy = policy_that_sent(("x", ["other"]), beta=0.0)
    assert policy.choose(PROMPT, {"x": 1.0, "y": 2.0, "z": 1.0}) == "z"


def test_a_replica_that_went_and_came_back_is_empty():
    policy = policy_that_sent(("y", PROMPT))
    policy.choose(PROMPT, {"x": 0.0, "z": 0.0})
    assert policy.scores(PROMPT, {"x": 0.0, "z": 0.0}) == {"x": 0.0, "z": 0.0}
    policy.choose(["new"], {"x": 0.0, "y": 0.0, "z": 0.0})
    assert policy.scores(PROMPT, {"x": 0.0, "y": 0.0, "z": 0.0})["y"] == 0.0


def test_a_report_corrects_what_was_believed():
    policy = policy_that_sent(("y", PROMPT), ("y", ["system", "d"]))
    policy.found("y", ["system", "d"], 0)
    assert policy.seen["y"].matched(["system", "d"]) == 2, "it has been computed again, so it is there now"
    policy.found("x", PROMPT, 2)
    assert policy.seen["x"].matched(PROMPT) == 4


def test_a_report_of_a_replica_that_is_gone_changes_nothing():
    policy = policy_that_sent(("y", PROMPT))
    policy.sent("gone", PROMPT)
    policy.found("gone", PROMPT, 1)
    assert set(policy.seen) == {"x", "y", "z"}


def test_without_a_replica_there_is_an_error():
    with pytest.raises(ValueError):
        PrefixScore().choose(PROMPT, {})


def test_a_negative_beta_is_refused():
    with pytest.raises(ValueError):
        PrefixScore(-0.1)


def test_an_empty_prompt_has_a_score():
    assert PrefixScore().choose([], {"x": 1.0, "y": 0.0}) == "y"


def test_round_robin_takes_turns_whatever_the_load():
    policy = RoundRobin()
    assert [policy.choose(PROMPT, {"x": 9.0, "y": 0.0}) for _ in range(4)] == ["x", "y", "x", "y"]
