"""Lesson 20. Shared by the tests: small loads."""

from lessons.l20_agents.agents import Load

SMALL = Load(agents=4, sessions=1, turns=(6.0, 0.5), scale=40.0, crowd=1.5, forks=0.05, compacts=0.05, drops=0.1)


def turns(seed):
    """Return the calls of a few agents with short texts."""
    return SMALL.generate(seed)
