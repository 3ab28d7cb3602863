"""Lesson 20. Sessions: soft references that follow their text, closing, and what a session leaves behind.

root ── [1 2] ─┬─ [3 4] ◄ A
               └─ [5] ◄ B
"""

import time

import pytest

from mini_engine.agents.session import Limits
from mini_engine.agents.sessions import LEFT, REFERENCED, UNCLAIMED, WAITING, Sessions
from mini_engine.base.errors import UserError
from mini_engine.kv.eviction import LRU
from tests.l20.parts import Clock, limits, place, prefix_of, refer, sessions_over
from tests.shared.trees import hang
from tests.support import must_raise


def two_sessions(**options):
    """Return the tree of this file's picture with its trunk, the leaves of A and B, and the sessions."""
    tree, sessions = sessions_over(**options)
    trunk = hang(tree, tree.root, (1, 2), (1, 2), used=4)
    a, b = hang(tree, trunk, (3, 4), (3, 4), used=3), hang(tree, trunk, (5,), (5,), used=4)
    refer(sessions, a, "A")
    refer(sessions, b, "B")
    return tree, trunk, a, b, sessions


# ---------------------------------------------------------------- a reference follows its text


@pytest.mark.task(3)
def test_a_session_that_loses_part_of_its_leaf_still_ends_there():
    tree, _, a, _, sessions = two_sessions()
    session = sessions.sessions[None, "A"]
    assert tree._cut(a, 1) == [4], "one of the leaf's two blocks goes"
    assert (session.end, session.num_blocks) == (a, 3), "the text's first three blocks are still there, up to this leaf"
    assert place(sessions, a) == REFERENCED, "its next turn would find three blocks: they still go last"


@pytest.mark.task(3)
def test_a_session_that_loses_its_leaf_ends_at_the_node_above():
    tree, trunk, a, _, sessions = two_sessions()
    session = sessions.sessions[None, "A"]
    tree._cut(a, 2)
    assert session.end is trunk, "the tree has the first two blocks of A's text, and they end at the trunk"
    assert session.num_blocks == 2, "two of its four blocks are left"
    assert sessions.ends.get(trunk) == {session}, "a lookup of the trunk must find the session"


@pytest.mark.task(3)
def test_a_node_that_has_gone_is_not_referred_to():
    tree, _, a, b, sessions = two_sessions()
    tree._cut(a, 2)
    assert a not in sessions.ends, "the leaf has left the tree: a reference would keep a freed node alive"
    assert a not in sessions._fallen, "nor is there anything to report of it: it cannot be evicted again"
    tree._cut(b, 1)
    assert len(sessions.ends) == 1, "both sessions end at the trunk now: one node, two sessions"


@pytest.mark.task(3)
def test_a_session_that_loses_all_of_its_text_refers_to_nothing():
    tree, trunk, a, b, sessions = two_sessions()
    tree._cut(b, 1)
    tree._cut(a, 2)
    tree._cut(trunk, 2)
    assert not sessions.ends, "no block of either text is left, and the root is not a place to refer to"
    assert all(session.end is None for session in sessions.sessions.values()), "a session without text has no end"
    assert not sessions.num_blocks, "what they refer to counts against their namespace: none, now"


@pytest.mark.task(3)
def test_a_reference_survives_a_split():
    tree, sessions = sessions_over()
    whole = hang(tree, tree.root, (1, 2, 3, 4), (1, 2, 3, 4), used=1)
    session = refer(sessions, whole, "A")
    upper = whole.split(2, tree.width)
    tree._cut(whole, 1)
    assert (session.end, session.num_blocks) == (whole, 3), "a split leaves the text's end in the lower node"
    tree._cut(whole, 1)
    assert (session.end, session.num_blocks) == (upper, 2), (
        "the lower part has gone. The text goes on at the node above *now*: the one that the split made, not the "
        "parent of the day when the session referred to it"
    )


@pytest.mark.task(3)
def test_all_sessions_that_end_in_a_leaf_move_together():
    tree, trunk, a, _, sessions = two_sessions()
    twin = refer(sessions, a, "twin of A")
    tree._cut(a, 2)
    ends = {session.key[1] for session in sessions.ends[trunk]}
    assert ends == {"A", "twin of A"}, "two sessions ended in this leaf, and both end at the node above now"
    assert twin.num_blocks == 2, "each of them has lost the two blocks"


@pytest.mark.task(3)
def test_a_namespace_s_blocks_are_those_that_are_left():
    tree, _, a, _, sessions = two_sessions()
    assert sessions.num_blocks[None] == 4 + 3, "A refers to four blocks and B to three"
    tree._cut(a, 1)
    assert sessions.num_blocks[None] == 3 + 3, "a block that has been evicted no longer counts against the limit"


@pytest.mark.task(3)
def test_evictions_of_what_is_referred_to_are_counted():
    tree, sessions = sessions_over()
    refer(sessions, hang(tree, tree.root, (1, 2), (1, 2)), "A")
    other = hang(tree, tree.root, (9,), (9,))
    tree._cut(other, 1)
    assert sessions.stats.evicted == 0, "no session refers to block 9"
    tree._cut(next(iter(sessions.ends)), 2)
    assert sessions.stats.evicted == 2, "a session referred to both blocks: so many are evicted while referenced"


@pytest.mark.task(3)
def test_what_a_session_left_stays_left_further_up():
    tree, sessions = sessions_over()
    trunk = hang(tree, tree.root, (1,), (1,), used=7)
    old = hang(tree, trunk, (2,), (2,), used=7)
    sessions.left[old] = old.last_used
    tree._cut(old, 1)
    assert old not in sessions.left, "the leaf has left the tree: what is noted of it must not keep it alive"
    assert place(sessions, trunk) == LEFT, "the rest of the dead branch goes first, too: no turn comes back to it"


@pytest.mark.task(3)
def test_what_another_request_used_later_is_not_left():
    tree, sessions = sessions_over()
    trunk = hang(tree, tree.root, (1,), (1,), used=8)
    old = hang(tree, trunk, (2,), (2,), used=7)
    sessions.left[old] = old.last_used
    tree._cut(old, 1)
    assert place(sessions, trunk) == UNCLAIMED, (
        "another request has used the trunk since the session left: it is not dead, only the branch below it was"
    )


# ---------------------------------------------------------------- closing


@pytest.mark.task(4)
def test_what_a_closed_session_referred_to_goes_in_the_usual_order_at_once():
    tree, _, a, b, sessions = two_sessions()
    for leaf in (a, b):
        tree.queue.add(leaf)
    newer = hang(tree, tree.root, (9,), (9,), used=50)
    tree.queue.add(newer)
    assert sessions.close("A", None) is True, "the session is known"
    assert place(sessions, a) == UNCLAIMED, "a closed session has no next turn: its leaf is one like any other"
    assert tree.queue.pop() is a, (
        "A's leaf was used before block 9, so it is the next to go. Its entry in the queue still says that a session "
        "refers to it: `fallen` must report it, or it waits behind everything else"
    )


@pytest.mark.task(4)
def test_a_leaf_that_has_fallen_is_reported_once():
    _, _, a, _, sessions = two_sessions()
    sessions.close("A", None)
    assert list(sessions.fallen()) == [a], "the queue asks before each eviction which leaves go earlier now"
    assert list(sessions.fallen()) == [], "it has been told: reporting a leaf for ever would keep a freed node alive"


def test_leaves_that_have_fallen_do_not_add_up_while_nothing_is_evicted():
    _, _, a, _, sessions = two_sessions()
    for _ in range(100):
        refer(sessions, a, "C")
        sessions.close("C", None)
        sessions.close("A", None)
        refer(sessions, a, "A")
    sessions.close("A", None)
    assert list(sessions.fallen()) == [a], "a pool that is never full never asks: each node may be noted only once"


@pytest.mark.task(4)
def test_what_another_session_refers_to_stays_last():
    _, _, a, _, sessions = two_sessions()
    refer(sessions, a, "twin of A")
    sessions.close("A", None)
    assert place(sessions, a) == REFERENCED, "the twin's next turn needs the same leaf"
    sessions.close("twin of A", None)
    assert place(sessions, a) == UNCLAIMED, "both are closed"


@pytest.mark.task(4)
def test_only_a_known_session_of_the_same_namespace_is_closed():
    tree, _, a, _, sessions = two_sessions()
    assert sessions.close("C", None) is False, "there is no session C: clients may say anything"
    assert sessions.close("A", "another tenant") is False, (
        "A belongs to another namespace: no other tenant may close it"
    )
    assert place(sessions, a) == REFERENCED, "A is open"
    assert sessions.close("A", None) and not sessions.close("A", None), "closed once, it is unknown"
    assert sessions.num_blocks[None] == 3, "only B's three blocks count against the namespace"
    assert tree.num_blocks == 5, "closing evicts nothing: the blocks may still be found"


@pytest.mark.task(4)
def test_a_session_that_is_closed_while_a_turn_runs_stays_closed():
    _, _, a, _, sessions = two_sessions()
    sessions.sessions[None, "A"].num_running = 1
    sessions.close("A", None)
    sessions.ended(prefix_of(a, "A"))
    assert (None, "A") not in sessions.sessions, "the client has said that there is no next turn"
    assert place(sessions, a) == UNCLAIMED, "the end of the turn must not open the session again"


@pytest.mark.task(4)
def test_a_session_that_has_been_idle_for_too_long_is_forgotten_before_an_eviction():
    clock = Clock()
    _, _, a, b, sessions = two_sessions(clock=clock, seconds=600)
    clock.now += 400
    sessions.sessions[None, "B"].num_running = 1
    sessions.ended(prefix_of(b, "B"))
    sessions.fallen()
    clock.now += 201
    assert list(sessions.fallen()) == [a], "A has been idle for 601 s of 600: its leaf goes earlier now. B for 201 s"
    assert set(sessions.sessions) == {(None, "B")}, "a client that never closes its sessions leaves nothing behind"


@pytest.mark.task(4)
def test_a_session_with_a_running_turn_does_not_expire():
    clock = Clock()
    _, _, a, _, sessions = two_sessions(clock=clock, seconds=600)
    sessions.sessions[None, "A"].num_running = 1
    clock.now += 601
    sessions.fallen()
    assert place(sessions, a) == REFERENCED, "its turn has been running for ten minutes: that is not idle"


@pytest.mark.task(4)
def test_leaves_that_the_other_policy_reports_are_reported_too():
    class Reports(LRU):
        reported = ()

        def fallen(self):
            return self.reported

    policy = Reports()
    _, _, a, b, sessions = two_sessions(policy=policy)
    policy.reported = (b,)
    sessions.close("A", None)
    assert set(sessions.fallen()) == {a, b}, "A's leaf by its session, B's by the policy that ranks within the groups"


# ---------------------------------------------------------------- a turn begins


def begun(sessions, node, name, names):
    """Begin a turn of session `name` with the prompt `names`, of which the tree has what ends at `node`."""
    prefix = prefix_of(node, name, names)
    sessions.began(prefix)
    return prefix


@pytest.mark.task(5)
def test_a_turn_that_goes_on_finds_its_own_text():
    _, _, a, _, sessions = two_sessions()
    begun(sessions, a, "A", (1, 2, 3, 4, 6))
    assert (sessions.stats.asked, sessions.stats.found) == (4, 4), "A's text had four blocks, and all are found again"
    assert place(sessions, a) == REFERENCED, "the session still refers to its text while the turn runs"
    assert sessions.sessions[None, "A"].num_running == 1, "a session with a running turn does not expire"


@pytest.mark.task(5)
def test_what_has_been_evicted_is_asked_for_and_not_found():
    _, trunk, _, _, sessions = two_sessions()
    begun(sessions, trunk, "A", (1, 2, 3, 4, 6))
    assert (sessions.stats.asked, sessions.stats.found) == (4, 2), "two of A's four blocks are still cached"


@pytest.mark.task(5)
def test_a_branch_that_a_session_has_left_goes_first():
    tree, trunk, a, b, sessions = two_sessions()
    older = hang(tree, tree.root, (9,), (9,), used=1)
    begun(sessions, trunk, "A", (1, 2, 7, 8))
    assert place(sessions, a) == LEFT, (
        "A's prompt does not continue its text: the agent has rewritten its history, and no turn "
        "comes back to the old one"
    )
    assert sorted([older, b, a], key=sessions.rank) == [a, older, b], (
        "the dead branch first, though block 9 was used longer ago; what a session refers to last"
    )
    assert sessions.stats.num_left == 1, "one branch was left"
    assert (sessions.stats.asked, sessions.stats.found) == (0, 0), "what was rewritten could not be found by any cache"


@pytest.mark.task(5)
def test_a_shorter_prompt_does_not_continue_the_text():
    _, trunk, a, _, sessions = two_sessions()
    begun(sessions, trunk, "A", (1, 2))
    assert place(sessions, a) == LEFT, "a prompt that is only the text's beginning has dropped the rest"


@pytest.mark.task(5)
def test_another_session_s_reference_is_not_left():
    _, trunk, a, _, sessions = two_sessions()
    refer(sessions, a, "fork of A")
    begun(sessions, trunk, "A", (1, 2, 7))
    assert place(sessions, a) == REFERENCED, "A has left this leaf, but the fork's next turn needs it"


@pytest.mark.task(5)
def test_what_is_used_again_is_no_longer_left():
    _, trunk, a, _, sessions = two_sessions()
    begun(sessions, trunk, "A", (1, 2, 7))
    a.last_used += 10
    assert place(sessions, a) == UNCLAIMED, "another request has found this branch since it was left: it is not dead"


@pytest.mark.task(5)
def test_a_branch_is_left_once():
    _, trunk, a, _, sessions = two_sessions()
    begun(sessions, trunk, "A", (1, 2, 7))
    begun(sessions, trunk, "A", (1, 2, 8))
    assert sessions.stats.num_left == 1, "the session referred to one branch, and has left it already"
    assert sessions.sessions[None, "A"].num_running == 2, "two turns of one session may run at a time"
    assert a not in sessions.ends, "what was left is not referred to"


@pytest.mark.task(5)
def test_a_prompt_that_all_share_is_no_hit_of_a_session():
    tree, sessions = sessions_over()
    system = hang(tree, tree.root, (1, 2), (1, 2))
    first = begun(sessions, system, "A", (1, 2, 3))
    assert sessions.stats.asked == 0, "a first turn has no text of its own to find again"
    first.node, first.num_stored = hang(tree, system, (3,), (3,)), 3
    sessions.ended(first)
    begun(sessions, first.node, "A", (1, 2, 3, 4))
    assert (sessions.stats.asked, sessions.stats.found) == (1, 1), (
        "two of the three blocks found are the system prompt, which the first turn had found: not this session's doing"
    )


@pytest.mark.task(5)
def test_a_request_of_no_session_changes_none():
    told = []

    class Told(LRU):
        def began(self, prefix):
            told.append(prefix)

    tree, sessions = sessions_over(policy=Told())
    prefix = begun(sessions, hang(tree, tree.root, (1,), (1,)), None, (1, 2))
    assert not sessions.sessions, "a client that names no session has none: None is not a name that all of them share"
    assert told == [prefix], "the other policy is told of every request, with a session or without"


@pytest.mark.task(5)
def test_the_same_name_in_another_namespace_is_another_session():
    _, trunk, a, _, sessions = two_sessions()
    prefix = prefix_of(trunk, "A", (1, 2, 7))
    prefix.namespace = "another tenant"
    sessions.began(prefix)
    assert place(sessions, a) == REFERENCED, "another tenant's session A has nothing to do with this one"
    assert set(sessions.sessions) == {(None, "A"), (None, "B"), ("another tenant", "A")}


@pytest.mark.task(5)
def test_a_turn_that_has_begun_no_longer_waits():
    _, _, a, _, sessions = two_sessions()
    sessions.waits("A", None)
    assert place(sessions, a) == WAITING, "A's next turn is in the queue: it is certain to need its text"
    begun(sessions, a, "A", (1, 2, 3, 4, 6))
    assert place(sessions, a) == REFERENCED, "the turn runs: nothing of A waits in the queue any more"


# ---------------------------------------------------------------- turns in the queue


def test_of_what_waits_the_last_in_the_queue_goes_first():
    _, _, a, b, sessions = two_sessions()
    sessions.waits("A", None)
    assert sorted([a, b], key=sessions.rank) == [b, a], "the queue is certain: what is only held goes before it"
    sessions.waits("B", None)
    sessions.waits("A", None)
    assert sorted([a, b], key=sessions.rank) == [b, a], "A came first and is admitted first: it is needed sooner"


def test_a_turn_that_gives_up_waits_no_more():
    tree, _, a, _, sessions = two_sessions()
    tree.queue.add(a)
    sessions.waits("A", None)
    tree.queue.pop()
    sessions.gave_up("A", None)
    assert place(sessions, a) == REFERENCED, "the request was cancelled in the queue"
    assert a in sessions.fallen(), "it goes earlier now, so the queue must hear of it"


def test_a_session_is_held_from_its_second_turn_on():
    tree, sessions = sessions_over()
    leaf = hang(tree, tree.root, (1,), (1,))
    for number, expected in ((1, UNCLAIMED), (2, REFERENCED)):
        prefix = prefix_of(leaf, "A")
        sessions.began(prefix)
        sessions.ended(prefix)
        assert place(sessions, leaf) == expected, f"after turn {number}: a session has to come back once to be held"


# ---------------------------------------------------------------- limits, and a turn's end


def test_a_turn_that_was_cut_short_does_not_take_the_reference_back():
    _, trunk, a, _, sessions = two_sessions()
    prefix = prefix_of(trunk, "A", (1, 2, 3, 4, 6))
    sessions.began(prefix)
    sessions.ended(prefix)
    assert sessions.sessions[None, "A"].end is a, "the request was cancelled before it had computed what the text has"


def test_the_number_of_sessions_is_bounded():
    tree, sessions = sessions_over(sessions=100)
    leaf = hang(tree, tree.root, (1,), (1,))
    for number in range(1000):
        sessions.began(prefix_of(leaf, f"session {number}"))
    assert len(sessions.sessions) == 100, "a client can open a million sessions; so many are remembered"
    assert (None, "session 999") in sessions.sessions, "the one that has been idle for longest gives way"


def test_a_client_that_opens_many_sessions_takes_nothing_from_another_namespace():
    tree, sessions = sessions_over(blocks=20, each=8)
    quiet = hang(tree, tree.root, (90, 91, 92), (90, 91, 92), namespace="quiet")
    refer(sessions, quiet, "the only one")
    for name in range(1, 11):
        refer(sessions, hang(tree, tree.root, (2 * name, 2 * name + 1), (2 * name, 2 * name + 1)), f"session {name}")
    assert sessions.num_blocks[None] <= 8, "a namespace refers to at most `each` blocks"
    assert place(sessions, quiet) == REFERENCED, "the quiet namespace refers to three blocks, and keeps them"


def test_if_all_together_have_too_many_the_largest_namespace_gives_way():
    tree, sessions = sessions_over(blocks=8, each=8)
    quiet = hang(tree, tree.root, (90, 91, 92), (90, 91, 92), namespace="quiet")
    large = [hang(tree, tree.root, (name, name + 1), (name, name + 1)) for name in (1, 3, 5)]
    for name, leaf in enumerate(large):
        refer(sessions, leaf, f"session {name}")
    refer(sessions, quiet, "the only one")
    assert sessions.num_blocks.total() <= 8, "all sessions together refer to at most `blocks`"
    assert place(sessions, quiet) == REFERENCED, "the other namespace has twice as many blocks: it gives some up"


@pytest.mark.parametrize(("patience", "gone"), [(30.0, "third"), (0.0, "first")])
def test_the_newest_session_gives_way_and_one_that_has_been_idle_for_long_before_it(patience, gone):
    tree, sessions = sessions_over(blocks=2, each=2, patience=patience)
    leaves = {name: hang(tree, tree.root, (at,), (at,)) for at, name in enumerate(("first", "second", "third"), 1)}
    for name, leaf in leaves.items():
        refer(sessions, leaf, name)
    places = {name: place(sessions, leaf) for name, leaf in leaves.items()}
    assert [name for name, where in places.items() if where != REFERENCED] == [gone]
    assert leaves[gone] in sessions.fallen(), "it goes earlier now, so the queue must hear of it"
    sessions.waits(gone, None)
    assert place(sessions, leaves[gone]) == WAITING, "its text stays known: if a turn comes, it protects it"


def test_the_default_clock_cannot_be_set():
    assert Sessions(limits()).clock is time.monotonic, "time.time jumps when the machine's clock is set"


def test_limits_that_make_no_sense_are_refused():
    for wrong in ({"blocks": -1}, {"sessions": 0}, {"seconds": -1.0}):
        with must_raise(UserError, f"{wrong} is no limit"):
            Limits(**{"blocks": 1, "each": 1} | wrong)
