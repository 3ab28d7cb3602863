"""Lesson 20. Generates the calls of agents and of a crowd, with the statistics that were published for agents.

An agent has one session after the other. A session begins with a system prompt that all sessions of its kind share and
with a task; each turn adds the answer and what the tool returned. Agents compact their histories, drop a thought, and
fork. The crowd asks one-off questions.
"""

import random
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import ceil, exp, log

from lessons.l20_agents.traces import TRACE_BLOCK, Call

TOOL_TIMES = ((0.86, 0.05, 1.0), (0.95, 1.0, 10.0), (1.0, 10.0, 540.0))  # share up to here, seconds from, to
PACE = 15.0  # seconds that a turn takes at first sight, for the order in which calls are written


@dataclass(frozen=True)
class Load:
    """Statistics of a load. A pair is the median and the spread of the logarithm.

    agents: how many work at the same time. sessions: of each, one after the other. turns: of a session.
    system, task, summary, growth, answer: tokens. growth: what a tool adds in a turn. kinds: of agents, each with a
        system prompt of its own. window: tokens at which a history is compacted into a summary.
    compacts, drops, forks, closes: shares, of turns that compact before they must, that do not repeat their last
        answer, and that start a second session with the same history; of sessions that are closed at their end.
    crowd: one-off questions for each turn of an agent, and `question`, their tokens.
    block: tokens that an id stands for. scale: all texts are this many times shorter.

    The medians over all turns are 43 turns in a session, 142,000 tokens in and 444 out (AgentX); 86 % of the tools
    take at most 1 s and 95 % at most 10 s (vllm-project/router #285); the tail ends after 9 minutes.
    """

    agents: int = 16
    sessions: int = 3
    turns: tuple[float, float] = (43.0, 0.5)
    system: int = 12_000
    task: tuple[float, float] = (8_000.0, 0.8)
    summary: tuple[float, float] = (12_000.0, 0.4)
    growth: tuple[float, float] = (3_300.0, 1.0)
    answer: tuple[float, float] = (444.0, 0.8)
    kinds: int = 3
    window: int = 400_000
    compacts: float = 0.003
    drops: float = 0.02
    forks: float = 0.01
    fork_turns: tuple[float, float] = (6.0, 0.5)
    closes: float = 0.5
    crowd: float = 1.0
    question: tuple[float, float] = (6_000.0, 1.2)
    block: int = TRACE_BLOCK
    scale: float = 1.0

    def generate(self, seed: int = 0) -> list[Call]:
        """Return the calls, in the order in which they would come if every turn took the same time."""
        return Generator(self, random.Random(seed)).calls()


@dataclass
class Talk:
    """A session that is being generated.

    text: its blocks so far. left: turns that it still has. sessions: that its agent has after it.
    after, wait: of its next call.
    """

    name: str
    agent: int
    text: list[int]
    left: int
    sessions: int
    after: int | None = None
    wait: float = 0.0


class Generator:
    """Draws the calls of a load."""

    def __init__(self, load: Load, chance: random.Random) -> None:
        self.load, self.chance = load, chance
        self.made: list[Call] = []
        self.ids = count(1)
        self.systems = [self.fresh(load.system) for _ in range(load.kinds)]

    def calls(self) -> list[Call]:
        """Return all calls."""
        ties, coming = count(), []
        for agent in range(self.load.agents):
            begins = self.chance.uniform(0, self.load.turns[0] * PACE)
            heappush(coming, (begins, next(ties), self.opening(agent, self.load.sessions)))
        while coming:
            now, _, talk = heappop(coming)
            for follower in self.turn(now, talk):
                heappush(coming, (now + PACE + follower.wait, next(ties), follower))
        return self.made

    def opening(self, agent: int, sessions: int, after: int | None = None) -> Talk:
        """Return the next session of an agent that has so many, this one included."""
        name = f"{agent}/{self.load.sessions - sessions}"
        wait = 0.0 if after is None else self.tool()
        return Talk(name, agent, self.start(agent), self.number(self.load.turns), sessions - 1, after, wait)

    def start(self, agent: int) -> list[int]:
        """Return a new text: the system prompt, and a task."""
        return [*self.systems[agent % self.load.kinds], *self.fresh(self.draw(self.load.task))]

    def turn(self, now: float, talk: Talk) -> list[Talk]:
        """Write a turn and the crowd's questions after it; return what follows it."""
        load, chance = self.load, self.chance
        tokens = self.draw(load.answer)
        closes = talk.left == 1 and chance.random() < load.closes
        call = self.write(talk, now, tokens, closes)
        self.ask(call)
        talk.left -= 1
        talk.after, talk.wait = call.index, self.tool()
        if not talk.left:
            return [self.opening(talk.agent, talk.sessions, call.index)] if talk.sessions else []
        forks = [self.fork(talk, call)] if chance.random() < load.forks else []
        talk.text = self.grown(talk, call)
        return [talk, *forks]

    def write(self, talk: Talk, now: float, tokens: float, closes: bool) -> Call:
        seconds = now if talk.after is None else 0.0
        self.made.append(
            Call(
                str(len(self.made)),
                talk.text,
                self.fresh(tokens),
                ceil(tokens / self.load.scale),
                seconds,
                talk.after,
                talk.wait,
                talk.name,
                closes=closes,
            )
        )
        return self.made[-1]

    def grown(self, talk: Talk, call: Call) -> list[int]:
        """Return the text of the next turn: compacted, or with what the tool returned."""
        load = self.load
        is_full = len(call.prompt) * load.block * load.scale > load.window
        if is_full or self.chance.random() < load.compacts:
            return [*self.systems[talk.agent % load.kinds], *self.fresh(self.draw(load.summary))]
        kept = call.prompt if self.chance.random() < load.drops else call.text
        return [*kept, *self.fresh(self.draw(load.growth))]

    def fork(self, talk: Talk, call: Call) -> Talk:
        """Return a session of its own that begins with all that was said so far."""
        text = [*call.text, *self.fresh(self.draw(self.load.task))]
        turns = self.number(self.load.fork_turns)
        return Talk(f"{talk.name}+{call.index}", talk.agent, text, turns, 0, call.index, self.tool())

    def ask(self, call: Call) -> None:
        """Write the crowd's questions after a call: as many as `load.crowd`, on average."""
        load = self.load
        for _ in range(int(load.crowd + self.chance.random())):
            text, tokens = self.fresh(self.draw(load.question)), self.draw(load.answer)
            output, wait = ceil(tokens / load.scale), self.chance.uniform(0, PACE)
            index = str(len(self.made))
            self.made.append(Call(index, text, self.fresh(tokens), output, after=call.index, wait=wait, group="crowd"))

    def fresh(self, tokens: float) -> list[int]:
        """Return ids for a new text of so many tokens, at least one id."""
        return [next(self.ids) for _ in range(max(1, round(tokens / self.load.scale / self.load.block)))]

    def draw(self, size: tuple[float, float]) -> float:
        return exp(self.chance.gauss(log(size[0]), size[1]))

    def number(self, size: tuple[float, float]) -> int:
        return max(1, round(self.draw(size)))

    def tool(self) -> float:
        """Return the seconds that a tool takes: each range's share, evenly over the logarithm."""
        part = self.chance.random()
        low, high = next((low, high) for share, low, high in TOOL_TIMES if part <= share)
        return exp(self.chance.uniform(log(low), log(high)))
