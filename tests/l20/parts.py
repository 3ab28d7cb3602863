"""Lesson 20. Shared by the tests: sessions over a tree that is built by hand, and a clock that a test sets."""

from mini_engine.agents.session import Limits, Session
from mini_engine.agents.sessions import Sessions
from mini_engine.kv.prefixes import SharedPrefix
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import key_of
from tests.shared.trees import SIZE, tokens


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def limits(**changes):
    """Return limits that nothing in a small test reaches, unless it says so."""
    return Limits(**{"blocks": 1000, "each": 1000} | changes)


def sessions_over(policy=None, clock=None, **changes):
    """Return an empty tree, and the sessions that order it."""
    sessions = Sessions(limits(**changes), policy, clock or Clock())
    return RadixTree(SIZE, policy=sessions), sessions


def text_of(node):
    """Return the whole text from the root to the end of this node, as a key."""
    return b"".join(bytes(part.key) for part in reversed(list(node.path())))


def prefix_of(node, session, names=None):
    """Return what a request notes that is a turn of `session` and has locked this node.

    names: its prompt in whole blocks; by default just what the tree has.
    """
    text = text_of(node)
    key = text if names is None else key_of(tokens(*names))
    return SharedPrefix(key, node.label[0], node, len(text) // 4 // SIZE, len(key) // 4 // SIZE, session=session)


def refer(sessions, node, name, num_shared=0):
    """Make `name` a session whose text ends at this node, as if several turns had ended there by now. Return it."""
    key = node.label[0], name
    session = sessions.sessions[key] = Session(key, num_shared, seen=sessions.clock(), num_running=1, num_turns=1)
    sessions.num_sessions[node.label[0]] += 1
    sessions.ended(prefix_of(node, name))
    return session


def place(sessions, leaf):
    """Return which of the four groups a leaf is in: 0 left behind, 1 not held, 2 held, 3 with a turn in the queue."""
    return sessions.rank(leaf)[0]
