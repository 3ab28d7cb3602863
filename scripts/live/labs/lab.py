"""Course machinery. A lab: knobs, presets, and a world of the engine's own objects in which events happen.

The world emits frames; the website's views draw them as they draw recorded traces.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from scripts import ROOT
from scripts.live.labs.events import NAMES, Event, joined, parse, whole_number
from scripts.live.labs.rules import Rules
from scripts.traces.tape import MOST_FRAMES, Tape

from lessons._course.catalog import read_lesson
from mini_engine.errors import UserError

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


class World(Protocol):
    """What a lab does with events."""

    def happen(self, event: Event) -> None:
        """Let one event happen, as zero or more frames."""

    def finish(self) -> None:
        """Show what is still to come, after the last event."""

    @property
    def alive(self) -> list[str]:
        """The requests that have not ended."""
        ...


@dataclass(frozen=True)
class Lab:
    """A lab's definition.

    kind: the view that draws it. prompt: what a request is made of, `words` or `sizes`; `example` is one. verbs: the
    events' kinds that its buttons offer, with their labels. modules: those that a student writes and can run here.
    lesson: the id of the lesson whose tasks keep the `rules`. code: the functions that its frames name (Tape.frame).
    """

    name: str
    title: str
    kind: str
    prompt: str
    example: str
    verbs: Mapping[str, str]
    knobs: Sequence[Knob]
    presets: Sequence[Preset]
    modules: Sequence[str]
    world: Callable[[Tape, dict[str, Any]], World]
    lesson: str
    rules: Rules
    code: Sequence[str]

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {knob.name: knob.read(given.get(knob.name, knob.default)) for knob in self.knobs}

    def play(self, given: Mapping[str, Any], do: str) -> tuple[Tape, list[str]]:
        """Return what happens as frames, and which requests are left. The frames end where the code fails."""
        settings, events = self.settings(given), parse(do)
        tape = Tape(f"lab-{self.name}", "", self.kind, self.title, {})
        world = self.world(tape, settings)
        try:
            for event in events:
                seen = len(tape.frames)
                world.happen(event)
                if self.breaks(tape, seen, settings, event.kind):
                    return tape, list(world.alive)
                if is_full(tape):
                    tape.frames[-1]["say"] += f" The lab shows {len(tape.frames)} frames and ends here."
                    return tape, list(world.alive)
            world.finish()
        except UserError:
            raise
        except Exception as error:
            if not tape.frames:
                raise
            tape.stopped(error)
            if task := self.task_of(error):
                tape.frames[-1]["broken"] = {"task": task, "says": "It stopped in your code."}
        return tape, list(world.alive)

    def breaks(self, tape: Tape, seen: int, settings: dict[str, Any], kind: str) -> bool:
        """End the tape with the first frame from `seen` on that breaks a rule, marked. Return whether one does."""
        for end in range(seen + 1, len(tape.frames) + 1):
            if broken := next(self.rules(tape.frames[:end], settings, kind), None):
                del tape.frames[end:]
                tape.frames[-1]["broken"] = {"task": broken[0], "says": broken[1]}
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

    def scenario(self, seed: int, length: int = 24) -> tuple[dict[str, Any], str]:
        """Return random settings and events; the same for the same seed."""
        chance = random.Random(f"{self.name} {seed}")
        settings = {knob.name: knob.any(chance) for knob in self.knobs}
        alive: list[str] = []
        events = [self._any_event(chance, alive) for _ in range(length)]
        return settings, joined(events)

    def _any_event(self, chance: random.Random, alive: list[str]) -> Event:
        free = [name for name in NAMES if name not in alive]
        kind = chance.choice([verb for verb in self.verbs if verb != "*"] + ["."])
        if (kind == "+" or not alive) and free:
            alive.append(free[0])
            return Event("+", free[0], self._any_prompt(chance))
        if kind == "-" and alive:
            name = chance.choice(alive)
            if self.prompt == "words":
                alive.remove(name)
            return Event("-", name)
        if kind == "!" and alive:
            return Event("!", chance.choice(alive), str(chance.randint(0, 6)))
        return Event(".")

    def _any_prompt(self, chance: random.Random) -> str:
        if self.prompt == "sizes":
            return f"{chance.randint(1, 12)},{chance.randint(1, 6)}"
        return " ".join(SOME_WORDS[: chance.randint(1, len(SOME_WORDS))])

    def described(self) -> dict[str, Any]:
        """For the page: everything but the code."""
        return {
            "name": self.name,
            "title": self.title,
            "kind": self.kind,
            "prompt": self.prompt,
            "example": self.example,
            "verbs": dict(self.verbs),
            "knobs": [asdict(knob) for knob in self.knobs],
            "modules": list(self.modules),
            "presets": [{**asdict(preset), "settings": dict(preset.settings)} for preset in self.presets],
        }


def is_full(tape: Tape) -> bool:
    """Whether only the frames of one more event fit."""
    return len(tape.frames) >= MOST_FRAMES - 12


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"
