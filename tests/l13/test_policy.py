"""Lesson 13. The score: what is known of a prompt against how busy a replica is; numbers only."""

import pytest

from mini_engine.routing.policy import PrefixScore, RoundRobin

PROMPT = ["system", "a", "b", "c"]


def policy_that_sent(*sent, beta=1.0, capacity=100):
    """A policy that knows replicas x, y and z, and has sent prompts: (replica, keys) each."""
    policy = PrefixScore(beta, capacity)
    policy.choose([], {"x": 0, "y": 0, "z": 0})
    for replica, keys in sent:
        policy.sent(replica, keys)
    return policy


# ---------------------------------------------------------------- the score


def test_the_score_is_the_share_that_is_known_minus_the_load_above_the_mean():
    policy = policy_that_sent(("x", PROMPT[:3]), beta=0.5)
    scores = policy.scores(PROMPT, {"x": 9.0, "y": 3.0, "z": 0.0})
    assert scores == pytest.approx({"x": 3 / 4 - 0.5 * 5 / 4, "y": 0.5 * 1 / 4, "z": 0.5 * 4 / 4})


def test_a_score_has_no_unit():
    policy = policy_that_sent(("x", PROMPT[:2]))
    in_tokens, in_blocks = ({"x": 4 * unit, "y": 8 * unit, "z": 3 * unit} for unit in (16.0, 1.0))
    scores = policy.scores(PROMPT, in_tokens)
    assert scores == pytest.approx(policy.scores(PROMPT, in_blocks)), "load counts relative to its mean"
    assert scores == pytest.approx(policy.scores([key for key in PROMPT for _ in range(2)][::2], in_blocks))


def test_below_a_mean_load_of_one_the_load_counts_in_requests():
    policy = policy_that_sent(("x", ["other"]))
    scores = policy.scores(PROMPT, {"x": 1.0, "y": 0.0, "z": 0.0})
    assert scores["x"] == pytest.approx(-2 / 3), "divided by max(1, mean): a single request is no overload"


def test_an_idle_house_has_scores():
    policy = policy_that_sent(("y", PROMPT[:1]))
    assert policy.scores(PROMPT, {"x": 0.0, "y": 0.0, "z": 0.0}) == {"x": 0.0, "y": 0.25, "z": 0.0}


def test_an_empty_prompt_has_a_score():
    policy = policy_that_sent(("x", PROMPT))
    assert policy.scores([], {"x": 1.0, "y": 1.0}) == {"x": 0.0, "y": 0.0}
    assert PrefixScore().choose([], {"x": 1.0, "y": 0.0}) == "y"


# ---------------------------------------------------------------- the choice


def test_a_known_prompt_goes_where_it_is_known():
    policy = policy_that_sent(("y", PROMPT))
    assert policy.choose(PROMPT, {"x": 2.0, "y": 2.0, "z": 2.0}) == "y"


def test_a_busy_replica_loses_even_a_prompt_that_it_knows():
    policy = policy_that_sent(("y", PROMPT))
    assert policy.choose(PROMPT, {"x": 0.0, "y": 12.0, "z": 0.0}) != "y", "beta 1: a load of 3 times the mean costs 2"


def test_with_beta_0_load_is_ignored():
    policy = policy_that_sent(("y", PROMPT[:1]), beta=0.0)
    assert policy.choose(PROMPT, {"x": 0.0, "y": 1000.0, "z": 0.0}) == "y", "pure affinity: this is the pile-up"


@pytest.mark.parametrize("order", ["xyz", "zyx", "yzx"])
def test_of_equal_scores_the_least_loaded_wins_then_the_one_that_holds_least(order):
    policy = policy_that_sent(("x", ["other"]), beta=0.0)
    loads = {"x": 1.0, "y": 2.0, "z": 1.0}
    assert policy.choose(PROMPT, {name: loads[name] for name in order}) == "z", "x and z are idle alike, and z is empty"
    assert policy.choose(PROMPT, {name: {**loads, "y": 0.0}[name] for name in order}) == "y", "load before emptiness"


def test_without_a_replica_there_is_an_error():
    policy = policy_that_sent(("x", PROMPT))
    with pytest.raises(ValueError):
        policy.choose(PROMPT, {})
    assert policy.seen["x"].matched(PROMPT) == 4, "a call that fails changes nothing"


def test_a_negative_beta_is_refused():
    with pytest.raises(ValueError):
        PrefixScore(-0.1)


# ---------------------------------------------------------------- what is believed


def test_a_choice_alone_notes_nothing():
    policy = PrefixScore()
    chosen = policy.choose(PROMPT, {"x": 0.0, "y": 0.0})
    assert policy.seen[chosen].matched(PROMPT) == 0, "the request may still go elsewhere; `sent` says where it went"


def test_each_replica_is_believed_to_hold_what_fits():
    policy = policy_that_sent(("x", PROMPT), capacity=3)
    assert policy.seen["x"].matched(PROMPT) == 3


def test_a_replica_that_went_and_came_back_is_empty():
    policy = policy_that_sent(("y", PROMPT), ("x", PROMPT[:1]))
    policy.choose(["new"], {"x": 0.0, "z": 0.0})
    policy.choose(["new"], {"x": 0.0, "y": 0.0, "z": 0.0})
    scores = policy.scores(PROMPT, {"x": 0.0, "y": 0.0, "z": 0.0})
    assert scores["y"] == 0.0, "a replica that came back is empty, whatever it had"
    assert scores["x"] == 0.25, "one that stayed has what it had"


def test_what_a_lost_replica_had_is_forgotten_at_once():
    policy = policy_that_sent(("y", PROMPT))
    policy.choose(PROMPT, {"x": 0.0, "z": 0.0})
    assert set(policy.seen) == {"x", "z"}, "views of replicas that are gone would pile up"


def test_a_report_teaches_what_another_router_sent():
    policy = policy_that_sent()
    policy.found("x", PROMPT, 2)
    assert policy.seen["x"].matched(PROMPT) == 4, "it had two of them, and has computed the others"


def test_a_report_corrects_what_was_believed():
    policy = policy_that_sent(("y", PROMPT), ("y", ["system", "d", "e", "f"]))
    policy.sent("y", ["system", "d", "x"])
    policy.found("y", ["system", "d", "x"], 1)
    assert policy.seen["y"].matched(["system", "d", "x"]) == 3, "it has been computed again, so it is there now"
    assert policy.seen["y"].matched(["system", "d", "e", "f"]) == 2, "d was lost, and what was behind it with it"
    assert policy.seen["y"].matched(PROMPT) == 4


def test_after_a_restart_one_report_empties_the_view():
    policy = policy_that_sent(*(("y", ["system", *name]) for name in ("abc", "def", "ghi")))
    policy.found("y", ["system", "n", "o"], 0)
    assert len(policy.seen["y"]) == 3, "it had not even the block that all prompts share: only this prompt is there"


def test_a_report_of_a_replica_that_is_gone_changes_nothing():
    policy = policy_that_sent(("y", PROMPT))
    policy.sent("gone", PROMPT)
    policy.found("gone", PROMPT, 1)
    assert set(policy.seen) == {"x", "y", "z"}


def test_round_robin_takes_turns_whatever_the_load():
    policy = RoundRobin()
    assert [policy.choose(PROMPT, {"x": 9.0, "y": 0.0}) for _ in range(4)] == ["x", "y", "x", "y"]
