"""Course machinery. The picture of lesson 19's states.

Protects readers from a picture of another protocol than the engine's.
"""

from scripts.pages import buffer_states

import pytest

from mini_engine.handover.stage import Event, State


def test_the_picture_is_that_of_the_table():
    assert buffer_states.main(["--check"]) == 0


def test_a_way_without_an_arrow_is_an_error(monkeypatch):
    monkeypatch.setitem(buffer_states.TRANSITIONS, (State.FREE, Event.CANCEL), State.OWED)
    with pytest.raises(ValueError, match="change ARROWS"):
        buffer_states.edges()
