"""Course machinery. A short load for lesson 20's lab: agents that wait for tools, and a crowd that passes meanwhile."""

import random
from dataclasses import dataclass

from scripts.traces.turns import SHARED, Turn

LETTERS = "ABC"
WAITS = (3, 3, 4, 5, 6, 12)  # seconds that a tool takes
NUM_TURNS = (4, 5)  # of an agent
MOST_TURNS = 24  # of all, so that a game takes a few minutes
COMPACTS, CLOSES, REPEATS, ASKS = 0.25, 0.7, 0.2, 0.85  # how likely each is, where it may happen


@dataclass
class Talk:
    """An agent's session. text: its blocks. due: when its next turn comes, or can come. left: turns that it still has.

    rewritten: its history has been replaced by a summary, whose blocks have small letters.
    """

    name: str
    due: int
    left: int
    text: tuple[str, ...] = (SHARED,)
    rewritten: bool = False

    def added(self) -> tuple[str, ...]:
        """Return the text with two more blocks: what was said or returned, and the answer."""
        letter = self.name.lower() if self.rewritten else self.name
        number = len(self.text)
        return *self.text, f"{letter}{number}", f"{letter}{number + 1}"


def load(seed: int, num_agents: int) -> list[Turn]:
    """Return the turns of agents and of a crowd, one a second at most; the same for the same seed."""
    chance = random.Random(f"load {seed} {num_agents}")
    talks = [Talk(LETTERS[i], i, chance.choice(NUM_TURNS)) for i in range(num_agents)]
    turns, questions, second = list[Turn](), list[Turn](), 0
    while any(talk.left for talk in talks) and len(turns) < MOST_TURNS:
        due = min((talk for talk in talks if talk.left), key=lambda talk: talk.due)
        if due.due <= second:
            turns.append(turn_of(due, second, chance))
        elif chance.random() < ASKS:
            turns.append(question_of(questions, second, chance))
        second += 1
    return turns


def turn_of(talk: Talk, second: int, chance: random.Random) -> Turn:
    """Return the next turn of an agent, which then waits for its tool, or ends."""
    is_old = len(talk.text) > 4 and not talk.rewritten
    if is_old and chance.random() < COMPACTS:
        talk.text, talk.rewritten = (SHARED,), True
    talk.text, talk.left = talk.added(), talk.left - 1
    talk.due = second + chance.choice(WAITS)
    closes = not talk.left and chance.random() < CLOSES
    return Turn(second, talk.name, talk.text, talk.name, closes)


def question_of(asked: list[Turn], second: int, chance: random.Random) -> Turn:
    """Return a question: a new one, or one that has been asked before."""
    if asked and chance.random() < REPEATS:
        old = chance.choice(asked)
        return Turn(second, old.name, old.blocks)
    number = len(asked) + 1
    blocks = [f"{number}{letter}" for letter in "abc"[: chance.choice((2, 2, 3))]]
    asked.append(Turn(second, str(number), (SHARED, *blocks)))
    return asked[-1]
