"""Course machinery. Lesson 5's lab: the lesson's scheduler and manager, with a model that always says the same word."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from scripts.live.labs.events import NAMES, whole_number
from scripts.live.labs.lab import Knob, Preset
from scripts.live.labs.scheduled import Scheduled
from scripts.traces.tape import listed
from scripts.traces.timeline import SCHEDULER, Cells, Steps

from mini_engine.base.errors import UserError
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.scheduler import Chunk, Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.manager import KvCacheManager

WORD = 1  # the model's only token


class Batch(Steps, Scheduled):
    """A scheduler, step by step. refused: its refusals since the last frame."""

    name, kind, lesson = "batch", "timeline", "l5_scheduler"
    title = "Your own batch"
    prompt, example = "sizes", "8,4"
    verbs: ClassVar = {"+": "Arrive", ".": "Run a step", "*": "Run to the end", "-": "Abort"}
    knobs = (
        Knob("blocks", "blocks", 9, 4, 24),
        Knob("size", "block size", 4, 1, 8),
        Knob("budget", "token budget of a step", 8, 6, 16),
        Knob("chunk", "largest chunk of a prompt", 16, 1, 16),
        Knob("seats", "requests at once", 4, 1, 6),
        Knob("promise", "admission promises room for", "known tokens", choices=("known tokens", "the whole answer")),
        Knob("policy", "policy", "fcfs", choices=("fcfs", "priority")),
    )
    presets = (
        Preset("A long prompt arrives while others decode: do they stall?", "+A=4,12;+B=3,12;.;.;+C=24,3;*",
               {"blocks": 16}),
        Preset("Which request gives way when the pool runs out?", "+A=6,11;+B=5,11;.;+C=7,9;*", {}),
        Preset("What if each admission is promised its whole answer?", "+A=6,11;+B=5,11;.;+C=7,9;*",
               {"promise": "the whole answer"}),
        Preset("May an urgent request overtake?", "+A=8,6,5;+B=8,6,5;.;+C=4,3,0;*", {"policy": "priority", "seats": 2}),
    )  # fmt: skip
    modules = ("mini_engine/kv/manager.py", "mini_engine/engine/scheduler.py")
    code = (SCHEDULER, *(f"{SCHEDULER}.{name}" for name in ("add", "finish", "preempt", "admit", "continue_running")))

    def __init__(self, chosen: dict[str, Any]) -> None:
        super().__init__(chosen, blocks=chosen["blocks"], budget=chosen["budget"], jobs=[])
        limits = SchedulerConfig(
            max_num_seqs=chosen["seats"],
            max_num_batched_tokens=chosen["budget"],
            chunked_prefill_size=chosen["chunk"],
            watermark=0,
            reserve_answers=chosen["promise"] == "the whole answer",
            policy=chosen["policy"],
        )
        self.scheduler = Scheduler(KvCacheManager(chosen["blocks"] + 1, chosen["size"]), limits)
        self.refused: list[str] = []
        self.computed = 0

    def state(self) -> dict[str, Any]:
        states = self.scheduler.manager.blocks_by_state
        held = f"{states.held} of {states.free + states.held}"
        return {"counters": self.counters() | {"tokens computed": self.computed, "blocks held": held}}

    def held_in(self, frame: Mapping[str, Any]) -> int:
        return sum(frame["held"].values())

    def sentences(self, cells: Cells, ended: list[str]) -> list[str]:
        return [*self.refused, *super().sentences(cells, ended)]

    def step(self) -> None:
        super().step()
        self.refused = []

    def finish(self) -> None:
        """Show which requests join in the next step."""
        said = [f"{listed(self.came)} joined the queue."] if self.came else []
        said += [f"{listed(self.gone)} will be gone."] if self.gone else []
        if said := [*self.refused, *said]:
            say = " ".join([f"Before step {self.steps}:", *said])
            code = f"{SCHEDULER}.{'finish' if self.gone else 'add'}"
        elif self.frames:
            return
        else:
            say, code = "No request yet.", SCHEDULER
        cells = {request.id: {"kind": "waits"} for request in self.scheduler.waiting}
        self.show(say, code, cells=cells, held=self.held(), ended=[])

    def arrive(self, name: str, text: str) -> None:
        sizes = text.split(",")
        if len(sizes) not in (2, 3):
            raise UserError(f"{name} is {text!r}; give prompt tokens, answer tokens and perhaps a priority: 12,5,0")
        prompt = whole_number(sizes[0], 1, 40, f"{name}'s prompt")
        answer = whole_number(sizes[1], 1, 20, f"{name}'s answer")
        priority = whole_number(sizes[2], 0, 9, f"{name}'s priority") if len(sizes) == 3 else 0
        if error := self.add(name, [WORD] * prompt, answer, priority):
            self.refused.append(f"{name} is refused: {error}.")
            return
        self.came.append(name)
        jobs = [job for job in self.scene["jobs"] if job["name"] != name]
        jobs.append({"name": name, "prompt": prompt, "answer": answer})
        self.scene["jobs"] = sorted(jobs, key=lambda job: NAMES.index(job["name"]))

    def leave(self, name: str) -> None:
        if name in self.alive:
            super().leave(name)
            self.came = [other for other in self.came if other != name]
            self.gone.append(name)

    def compute(self, chunks: Sequence[Chunk]) -> list[Sampled]:
        """Act as the model: return one token for each chunk that samples."""
        self.computed += sum(chunk.stop - chunk.start for chunk in chunks)
        return [Sampled(WORD, None) for chunk in chunks if chunk.samples]
