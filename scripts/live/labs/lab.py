"""Course machinery. The base of the labs: knobs, presets, and the engine's own objects, driven by a reader's events.

A lab is a subclass of Lab in a module of this folder: a Tape (`scripts/traces/tape.py`) whose frames come from events
instead of a story. The website's views draw them as they draw recorded traces.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from scripts import ROOT
from scripts.live.labs.events import NAMES, Event, joined, parse, whole_number
from scripts.live.labs.rules import RULES
from scripts.traces.tape import MOST_FRAMES, Tape

from lessons._course.catalog import read_lesson
from mini_engine.base.errors import UserError

SOME_WORDS = ["once", "upon", "a", "time", "there", "was", "a", "small", "pool", "of", "blocks"]


@dataclass(frozen=True)
class Knob:
    """A setting: a whole number from `low` to `high`, or one of `choices`."""

    name: str
    label: str
    default: int | str
    low: int = 0
    high: int = 0
    choices: Sequence[str] = ()

    def read(self, value: Any) -> int | str:
        """Return the setting; UserError if it is not allowed."""
        if not self.choices:
            return whole_number(str(value), self.low, self.high, self.label)
        if value not in self.choices:
            raise UserError(f"{self.label} is {value!r}; choose one of {', '.join(self.choices)}")
        return str(value)

    def any(self, chance: random.Random) -> int | str:
        return chance.choice(self.choices) if self.choices else chance.randint(self.low, self.high)


@dataclass(frozen=True)
class Preset:
    """A scenario with a name, which is a question. `settings` that differ from the knobs' defaults."""

    question: str
    do: str
    settings: Mapping[str, int | str]


class Lab(Tape):
    """A lab; an instance is one run of it, with the settings `chosen`.

    kind: the view that draws it. prompt: what a request is made of, `words` or `sizes`, of which `example` is one; ""
    if the lab has its own requests. verbs: the events' kinds that its buttons offer, with their labels. invites: the
    button that opens it. syntax: of its events, in a few words. modules: those that a student writes and can run here.
    lesson: the id of the lesson whose tasks keep its rules. code: the functions that its frames name (Tape.show).
    """

    name: str
    kind: str
    title: str
    prompt: str
    example: str
    invites: str = "Try it with requests of your own"
    syntax: str = "+A=… arrives, -A ends, . is a step, * runs to the end"
    lesson: str
    verbs: ClassVar[Mapping[str, str]]
    knobs: Sequence[Knob]
    presets: Sequence[Preset]
    modules: Sequence[str]
    code: Sequence[str]

    def __init__(self, chosen: dict[str, Any], **scene: Any) -> None:
        super().__init__(f"lab-{self.name}", "", self.kind, self.title, 0, **scene)
        self.chosen = chosen

    def arrive(self, name: str, text: str) -> None:
        """Start a request."""
        raise NotImplementedError

    def leave(self, name: str) -> None:
        """End or abort a request, if there is one."""
        raise NotImplementedError

    def step(self) -> None:
        """Advance each request by a step."""
        raise NotImplementedError

    @property
    def alive(self) -> list[str]:
        """The requests that have not ended."""
        raise NotImplementedError

    def happen(self, event: Event) -> None:
        """Carry out one event, as zero or more frames."""
        if event.kind == "+":
            self.arrive(event.name, event.text)
        elif event.kind == "-":
            self.leave(event.name)
        elif event.kind == "*" and "*" in self.verbs:
            while self.alive and not self.is_full:
                self.step()
        else:
            self.step()

    def finish(self) -> None:
        """Show the state after the last event, with pending changes."""

    @property
    def is_full(self) -> bool:
        """True if only the frames of one more event fit."""
        return len(self.frames) >= MOST_FRAMES - 12

    @property
    def fullest(self) -> int:
        """The index of the frame to open on: one that breaks a rule, or the first with the most blocks held."""
        if "broken" in self.frames[-1]:
            return len(self.frames) - 1
        return max(range(len(self.frames)), key=lambda index: (self.held_in(self.frames[index]), -index))

    def held_in(self, frame: Mapping[str, Any]) -> int:
        """Return the number of blocks that a frame shows as held."""
        return sum(len(each["blocks"]) for key in ("requests", "tables", "nodes") for each in frame.get(key, ()))

    @property
    def trace(self) -> dict[str, Any]:
        """Return the trace for a page."""
        return {key: value for key, value in self.data.items() if key not in ("file", "poster")}

    @classmethod
    def settings(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return {knob.name: knob.read(given.get(knob.name, knob.default)) for knob in cls.knobs}

    @classmethod
    def play(cls, given: Mapping[str, Any], do: str) -> "Lab":
        """Carry out events. The frames end where the code fails or breaks a rule."""
        chosen, events = cls.settings(given), parse(do)
        lab = cls(chosen)
        try:
            for event in events:
                seen = len(lab.frames)
                lab.happen(event)
                if lab.breaks(seen, event.kind):
                    return lab
                if lab.is_full:
                    lab.frames[-1]["say"] += f" The lab shows {len(lab.frames)} frames and ends here."
                    return lab
            lab.finish()
        except UserError:
            raise
        except Exception as error:
            if not lab.frames:
                raise
            lab.stopped(error)
            if task := lab.task_of(error):
                lab.frames[-1]["broken"] = {"task": task, "says": "It stopped in your code."}
        return lab

    def breaks(self, seen: int, kind: str) -> bool:
        """End with the first frame from `seen` on that breaks a rule, and mark it. Return True if there is one."""
        for end in range(seen + 1, len(self.frames) + 1):
            if broken := next(RULES[self.name](self.frames[:end], self.chosen, kind), None):
                del self.frames[end:]
                self.frames[-1]["broken"] = {"task": broken[0], "says": broken[1]}
                return True
        return False

    def task_of(self, error: BaseException) -> int | None:
        """Return the task in whose function the error was raised, or was called from; None if there is none."""
        names = {}
        for task in read_lesson(ROOT / "lessons" / self.lesson / "lesson.toml").tasks:
            names |= {(target.file.rpartition("/")[2], target.symbol): task.number for target in task.targets}
        found, at = None, error.__traceback__
        while at:
            code = at.tb_frame.f_code
            found = names.get((code.co_filename.replace("\\", "/").rpartition("/")[2], code.co_qualname), found)
            at = at.tb_next
        return found

    @classmethod
    def scenario(cls, seed: int, length: int = 24) -> tuple[dict[str, Any], str]:
        """Return random settings and events; the same for the same seed."""
        chance = random.Random(f"{cls.name} {seed}")
        settings = {knob.name: knob.any(chance) for knob in cls.knobs}
        alive: list[str] = []
        return settings, joined([cls.any_event(chance, alive) for _ in range(length)])

    @classmethod
    def any_event(cls, chance: random.Random, alive: list[str]) -> Event:
        """Return a random event; `alive` is changed with it."""
        free = [name for name in NAMES if name not in alive]
        kind = chance.choice([verb for verb in cls.verbs if verb != "*"] + ["."])
        if (kind == "+" or not alive) and free:
            alive.append(free[0])
            return Event("+", free[0], cls.any_prompt(chance))
        if kind == "-" and alive:
            name = chance.choice(alive)
            if cls.prompt == "words":
                alive.remove(name)
            return Event("-", name)
        if kind == "!" and alive:
            return Event("!", chance.choice(alive), str(chance.randint(0, 6)))
        return Event(".")

    @classmethod
    def any_prompt(cls, chance: random.Random) -> str:
        if cls.prompt == "sizes":
            return f"{chance.randint(1, 12)},{chance.randint(1, 6)}"
        return " ".join(SOME_WORDS[: chance.randint(1, len(SOME_WORDS))])

    @classmethod
    def described(cls) -> dict[str, Any]:
        """Return the lab's description for the page: everything but the code."""
        about = {
            name: getattr(cls, name)
            for name in ("name", "title", "kind", "prompt", "example", "verbs", "invites", "syntax")
        }
        knobs, presets = ([asdict(one) for one in some] for some in (cls.knobs, cls.presets))
        return about | {"knobs": knobs, "modules": list(cls.modules), "presets": presets}


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"
