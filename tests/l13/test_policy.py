"""Lesson 13. The score: what is known of a prompt against how busy a replica is; numbers only."""

import pytest

from mini_engine.distributed.routing import policy as policy_module
from mini_engine.distributed.routing.policy import PrefixScore, RoundRobin
from tests.support import must_raise

PROMPT = ["system", "a", "b", "c"]


class Known:
    """A view without age: all blocks that it was told of, and the calls that told it."""

    def __init__(self, capacity, *keys):
        self.capacity, self.keys, self.calls = capacity, set(keys), []

    def __len__(self):
        return len(self.keys)

    def matched(self, keys):
        return next((index for index, key in enumerate(keys) if key not in self.keys), len(keys))

    def add(self, keys):
        self.keys |= set(keys)
        self.calls.append(("add", list(keys)))

    def correct(self, keys, num_found):
        self.keys -= set(keys[num_found:])
        self.calls.append(("correct", list(keys), num_found))


@pytest.fixture(autouse=True)
def plain_views(monkeypatch):
    """The policy makes views of this kind, so its own tests need no other task."""
    monkeypatch.setattr(policy_module, "SeenBlocks", Known)


def policy_that_knows(beta=1.0, capacity=100, **views):
    """A policy for replicas x, y and z, each of which has the blocks that are given."""
    policy = PrefixScore(beta, capacity)
    policy.seen = {name: Known(capacity, *views.get(name, ())) for name in "xyz"}
    return policy


def scores_of(policy, loads):
    """The scores for PROMPT, without the last digits."""
    return {name: round(score, 6) for name, score in policy.scores(PROMPT, loads).items()}


# ---------------------------------------------------------------- the score


@pytest.mark.task(3)
def test_of_equal_loads_the_score_is_the_share_that_is_known():
    policy = policy_that_knows(x=PROMPT[:3], y=PROMPT)
    assert scores_of(policy, dict.fromkeys("xyz", 4.0)) == {"x": 0.75, "y": 1.0, "z": 0.0}, (
        "the loads are equal, so what counts is the share of the prompt that is known: 3 of 4 blocks, all, none"
    )
    assert policy.scores(PROMPT[:1], {"x": 4.0, "z": 4.0}) == {"x": 1.0, "z": 0.0}, "a prompt of one block, or none"


@pytest.mark.task(3)
def test_of_an_unknown_prompt_the_score_is_the_load_above_the_mean():
    policy = policy_that_knows(beta=0.5)
    assert scores_of(policy, {"x": 9.0, "y": 3.0, "z": 0.0}) == {"x": -0.625, "y": 0.125, "z": 0.5}, (
        "nothing is known; the mean load is 4: x is 5/4 of it above the mean, y 1/4 and z 4/4 below, times beta = 0.5"
    )


@pytest.mark.task(3)
def test_the_score_is_the_share_that_is_known_minus_the_load_above_the_mean():
    policy = policy_that_knows(x=PROMPT[:3], beta=0.5)
    expected = {"x": 3 / 4 - 0.5 * 5 / 4, "y": 0.5 * 1 / 4, "z": 0.5 * 4 / 4}
    assert scores_of(policy, {"x": 9.0, "y": 3.0, "z": 0.0}) == expected, (
        "x knows 3 of 4 blocks; the mean load is 4, and beta one half"
    )


@pytest.mark.task(3)
def test_a_score_has_no_unit():
    policy = policy_that_knows(x=PROMPT[:2])
    in_tokens, in_blocks = ({"x": 4 * unit, "y": 8 * unit, "z": 3 * unit} for unit in (16.0, 1.0))
    assert scores_of(policy, in_tokens) == scores_of(policy, in_blocks), "load counts relative to its mean"


@pytest.mark.task(3)
def test_below_a_mean_load_of_one_the_load_counts_in_requests():
    policy = policy_that_knows(x=["other"])
    scores = scores_of(policy, {"x": 1.0, "y": 0.0, "z": 0.0})
    assert scores["x"] == round(-2 / 3, 6), "divided by max(1, mean): a single request is no overload"


@pytest.mark.task(3)
def test_an_idle_house_has_scores():
    policy = policy_that_knows(y=PROMPT[:1])
    scores = policy.scores(PROMPT, {"x": 0.0, "y": 0.0, "z": 0.0})
    assert scores == {"x": 0.0, "y": 0.25, "z": 0.0}, "without a load, the share that is known is all that counts"


@pytest.mark.task(3)
def test_an_empty_prompt_has_a_score():
    policy = policy_that_knows(x=PROMPT)
    assert policy.scores([], {"x": 1.0, "y": 1.0}) == {"x": 0.0, "y": 0.0}, "of an empty prompt the known share is 0"
    assert PrefixScore().choose([], {"x": 1.0, "y": 0.0}) == "y", "an empty prompt goes to the least loaded replica"


# ---------------------------------------------------------------- the choice


@pytest.mark.task(3)
def test_a_known_prompt_goes_where_it_is_known():
    policy = policy_that_knows(y=PROMPT)
    assert policy.choose(PROMPT, {"x": 2.0, "y": 2.0, "z": 2.0}) == "y", "the loads are equal, and y knows the prompt"


@pytest.mark.task(3)
def test_a_busy_replica_loses_even_a_prompt_that_it_knows():
    policy = policy_that_knows(y=PROMPT)
    assert policy.choose(PROMPT, {"x": 0.0, "y": 12.0, "z": 0.0}) != "y", "beta 1: a load of 3 times the mean costs 2"


@pytest.mark.task(3)
def test_with_beta_0_load_is_ignored():
    policy = policy_that_knows(y=PROMPT[:1], beta=0.0)
    assert policy.choose(PROMPT, {"x": 0.0, "y": 1000.0, "z": 0.0}) == "y", "pure affinity: this is the pile-up"


@pytest.mark.task(3)
def test_a_choice_alone_notes_nothing():
    policy = PrefixScore()
    policy.choose(PROMPT, {"x": 0.0, "y": 0.0})
    known = {name: view.matched(PROMPT) for name, view in policy.seen.items()}
    assert known == {"x": 0, "y": 0}, "the request may still go elsewhere; `sent` says where it went"


@pytest.mark.task(3)
@pytest.mark.parametrize("order", ["xyz", "zyx", "yzx"])
def test_of_equal_scores_the_least_loaded_wins_then_the_one_that_holds_least(order):
    policy = policy_that_knows(x=["other"], beta=0.0)
    loads = {"x": 1.0, "y": 2.0, "z": 1.0}
    assert policy.choose(PROMPT, {name: loads[name] for name in order}) == "z", (
        "x and z are equally idle, and z is empty"
    )
    assert policy.choose(PROMPT, {name: {**loads, "y": 0.0}[name] for name in order}) == "y", (
        "of equal scores y has the least load; which replica holds least counts only among equal loads"
    )


@pytest.mark.task(3)
def test_without_a_replica_there_is_an_error():
    policy = policy_that_knows(x=PROMPT)
    with must_raise(ValueError, "there is no replica to choose from"):
        policy.choose(PROMPT, {})
    assert sorted(policy.seen) == ["x", "y", "z"], (
        "a call that fails changes nothing: refuse empty `loads` before `seen` is changed"
    )


def test_a_negative_beta_is_refused():
    with pytest.raises(ValueError):
        PrefixScore(-0.1)


# ---------------------------------------------------------------- what is believed


@pytest.mark.task(3)
def test_a_new_replica_s_view_has_the_capacity_of_its_cache():
    policy = PrefixScore(capacity=3)
    policy.choose(PROMPT, {"x": 0.0, "y": 0.0})
    made = {name: (view.capacity, len(view)) for name, view in policy.seen.items()}
    assert made == {"x": (3, 0), "y": (3, 0)}, (
        "for each replica its view's capacity, here 3, and the blocks in it, none"
    )


@pytest.mark.task(3)
def test_a_replica_that_stays_keeps_its_view():
    policy = policy_that_knows(x=PROMPT)
    views = dict(policy.seen)
    policy.choose(PROMPT, {"z": 0.0, "y": 0.0, "x": 0.0})
    assert all(policy.seen[name] is view for name, view in views.items()), (
        "x, y and z all stay, so their views are kept; an empty view is a view too"
    )


@pytest.mark.task(3)
def test_a_replica_that_went_and_came_back_is_empty():
    policy = policy_that_knows(y=PROMPT, x=PROMPT[:1])
    policy.choose(["new"], {"x": 0.0, "z": 0.0})
    policy.choose(["new"], {"x": 0.0, "y": 0.0, "z": 0.0})
    scores = policy.scores(PROMPT, {"x": 0.0, "y": 0.0, "z": 0.0})
    assert scores["y"] == 0.0, "a replica that came back is empty, whatever it had"
    assert scores["x"] == 0.25, "one that stayed has what it had"


@pytest.mark.task(3)
def test_what_a_lost_replica_had_is_forgotten_at_once():
    policy = policy_that_knows(y=PROMPT)
    policy.choose(PROMPT, {"x": 0.0, "z": 0.0})
    assert sorted(policy.seen) == ["x", "z"], "views of replicas that are gone would pile up"


# ---------------------------------------------------------------- what is sent, and what was found


@pytest.mark.task(4)
def test_what_is_sent_is_believed_of_that_replica_alone():
    policy = policy_that_knows()
    policy.sent("y", PROMPT)
    known = {name: view.matched(PROMPT) for name, view in policy.seen.items()}
    assert known == {"x": 0, "y": 4, "z": 0}, "the 4 blocks of the prompt were sent to y, and nothing to the others"


@pytest.mark.task(4)
def test_a_report_teaches_what_another_router_sent():
    policy = policy_that_knows()
    policy.found("x", PROMPT, 2)
    assert policy.seen["x"].matched(PROMPT) == 4, "it had two of them, and has computed the others"


@pytest.mark.task(4)
def test_a_report_corrects_first_and_notes_then():
    policy = policy_that_knows(y=PROMPT)
    policy.found("y", PROMPT, 1)
    calls = policy.seen["y"].calls
    assert ("correct", PROMPT, 1) in calls, "a view that ignores reports goes stale: what was lost is believed for ever"
    assert policy.seen["y"].matched(PROMPT) == 4, "what it had lost it has computed again, so it is there now"
    assert not policy.seen["x"].calls, "a report of y says nothing of x"


@pytest.mark.task(4)
def test_a_report_of_a_replica_that_is_gone_changes_nothing():
    policy = policy_that_knows(y=PROMPT)
    policy.sent("gone", PROMPT)
    policy.found("gone", PROMPT, 1)
    assert sorted(policy.seen) == ["x", "y", "z"], "only `choose` makes entries: it knows which replicas there are"
    assert not any(view.calls for view in policy.seen.values()), "what is gone says nothing of the others"


# ---------------------------------------------------------------- what it is compared with


def test_round_robin_takes_turns_whatever_the_load():
    policy = RoundRobin()
    turns = [policy.choose(PROMPT, {"x": 9.0, "y": 0.0, "z": 5.0}) for _ in range(4)]
    assert turns == ["x", "y", "z", "x"], "each in its turn, in their order"
