"""Lesson 20. Part `neighbours` of the suite `agents`: what a client can take from others with its hints.

A few agents work beside chats that give no session. Then one more client comes, in three ways: its agents never close a
session, or it opens a session for each of many one-off questions. The other clients' hits are compared with what they
have with the same calls under plain LRU, and under sessions if that client gave no hints.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace

from scripts.bench.agents_load import POOL
from scripts.bench.turns import with_progress

from lessons.l20_agents.agents import Load
from lessons.l20_agents.compare import POLICIES, Row, sessions
from lessons.l20_agents.replay import Outcome, Replay
from lessons.l20_agents.traces import Call

GOOD = Load(agents=12, sessions=2, closes=1.0, crowd=0.0)
CHATS = replace(GOOD, turns=(6.0, 0.5), agents=24, sessions=4, system=500, kinds=1, task=(4_000.0, 0.8), forks=0.0)
BAD = replace(GOOD, closes=0.0, agents=12)
QUESTIONS = replace(BAD, turns=(1.0, 0.0), sessions=120, forks=0.0, task=(16_000.0, 1.0))
FIRST = 2**24  # ids of the next load: no two share a text


def merged(loads: dict[str, tuple[Load, object, bool]], seed: int) -> list[Call]:
    """Return the calls of several clients. A client has a load, a namespace, and may give no sessions."""
    calls: list[Call] = []
    for number, (name, (load, namespace, has_sessions)) in enumerate(loads.items()):
        calls += moved(load.generate(seed + number), name, namespace, has_sessions, len(calls), number * FIRST)
    return calls


def moved(
    calls: Sequence[Call], group: str, namespace: object, has_sessions: bool, first: int, above: int
) -> Iterator[Call]:
    """Yield the calls with other indices and ids, for one client."""
    for call in calls:
        yield replace(
            call,
            id=str(call.index + first),
            prompt=[one + above for one in call.prompt],
            answer=[one + above for one in call.answer],
            after=None if call.after is None else call.after + first,
            session=(group, call.session) if has_sessions else None,
            namespace=namespace,
            closes=call.closes and has_sessions,
            group=group,
        )


def neighbours(args: Namespace) -> tuple[list[Row], str]:
    """Return a row for each way and namespace: hits of the others under LRU and under sessions."""
    ways = {"none": {}, "never closes": {"abuser": BAD}, "a session a question": {"abuser": QUESTIONS}}
    cases = [(way, space) for way in ways for space in ("the same", "its own") if way != "none" or space == "the same"]
    rows: list[Row] = []
    for way, space in with_progress(cases, "neighbours"):
        loads: dict[str, tuple[Load, object, bool]] = {"agents": (GOOD, None, True), "chats": (CHATS, None, False)}
        loads |= {name: (load, None if space == "the same" else "abuser", True) for name, load in ways[way].items()}
        trace = merged(loads, 0)
        silent = [replace(call, session=None) if call.group == "abuser" else call for call in trace]
        runs = {
            "LRU": Replay(trace, POLICIES["LRU"], POOL // 2).run(),
            "without its hints": Replay(silent, sessions, POOL // 2).run(),
            "sessions": Replay(trace, sessions, POOL // 2).run(),
        }
        rows.append({"the other client": way, "namespace": space} | compared(runs))
    said = (
        f"{GOOD.agents} agents that close their sessions and {CHATS.agents} chats without sessions share "
        f"{POOL // 2:,} blocks with a client that has {BAD.agents} agents, or asks {QUESTIONS.agents} × "
        f"{QUESTIONS.sessions} questions; hits in percent"
    )
    return rows, said


def compared(runs: dict[str, Outcome]) -> Row:
    """Return the hits of both groups in each run."""
    return {
        f"{group}, {name}": 100 * run.hit_rate(group) for group in ("agents", "chats") for name, run in runs.items()
    }
