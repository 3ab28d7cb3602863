"""Course machinery. Lesson 5's lab: the lesson's scheduler and manager, with a model that always says the same word."""

from types import SimpleNamespace
from typing import Any

from scripts.live.labs.events import NAMES, whole_number
from scripts.live.labs.lab import Knob, Lab, Preset
from scripts.live.labs.rules import batch_rules
from scripts.live.labs.scheduled import Scheduled
from scripts.traces.tape import Tape, listed
from scripts.traces.timeline import SCHEDULER, Recorder, show

from mini_engine.errors import UserError

WORD = 1  # the token that the model says


class Batch(Scheduled):
    """A scheduler that is stepped."""

    def __init__(self, tape: Tape, settings: dict[str, Any]) -> None:
        from mini_engine.engine.scheduler import Scheduler, SchedulerConfig
        from mini_engine.kv.manager import KvCacheManager

        seats, budget = settings["seats"], settings["budget"]
        limits = SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            chunked_prefill_size=settings["chunk"],
            watermark=0,
            reserve_answers=settings["promise"] == "the whole answer",
            policy=settings["policy"],
        )
        manager = KvCacheManager(settings["blocks"] + 1, settings["size"])
        self.tape, self.scheduler = tape, Scheduler(manager, limits)
        self.recorder = Recorder(SimpleNamespace(runner=SimpleNamespace(run=self.compute), scheduler=self.scheduler))
        self.came: list[str] = []
        self.gone: list[str] = []
        self.refused: list[str] = []
        self.steps = self.computed = 0
        self.jobs: list[dict[str, Any]] = []
        tape.scene |= {"blocks": settings["blocks"], "budget": budget, "jobs": self.jobs}

    def finish(self) -> None:
        """Show which requests join in the next step."""
        if self.came or self.gone or self.refused or not self.tape.frames:
            said = [*self.refused, f"{listed(self.came)} joined the queue." if self.came else ""]
            said += [f"{listed(self.gone)} will be gone." if self.gone else ""]
            cells = {request.id: {"kind": "waits"} for request in self.scheduler.waiting}
            held = {name: len(table.blocks) for name, table in self.scheduler.manager.tables.items()}
            say = " ".join(filter(None, [f"Before step {self.steps}:", *said])) if any(said) else "No request yet."
            code = f"{SCHEDULER}.{'finish' if self.gone else 'add'}" if any(said) else SCHEDULER
            self.tape.frame(say, code=code, cells=cells, held=held, ended=[], counters=self.counters())

    def arrive(self, name: str, text: str) -> None:
        from mini_engine.engine.request import Request
        from mini_engine.engine.sampling_params import SamplingParams

        sizes = text.split(",")
        if len(sizes) not in (2, 3):
            raise UserError(f"{name} is {text!r}; give prompt tokens, answer tokens and perhaps a priority: 12,5,0")
        prompt = whole_number(sizes[0], 1, 40, f"{name}'s prompt")
        answer = whole_number(sizes[1], 1, 20, f"{name}'s answer")
        priority = whole_number(sizes[2], 0, 9, f"{name}'s priority") if len(sizes) == 3 else 0
        params = SamplingParams(temperature=0, max_tokens=answer, seed=0)
        try:
            self.scheduler.add(Request(name, [WORD] * prompt, params, priority))
        except UserError as error:
            self.refused.append(f"{name} is refused: {error}.")
            return
        self.came.append(name)
        self.jobs[:] = sorted(
            [job for job in self.jobs if job["name"] != name] + [{"name": name, "prompt": prompt, "answer": answer}],
            key=lambda job: NAMES.index(job["name"]),
        )

    def abort(self, name: str) -> bool:
        was_there = super().abort(name)
        if was_there:
            self.came = [other for other in self.came if other != name]
            self.gone.append(name)
        return was_there

    def compute(self, chunks) -> list[Any]:
        """The model: one token for each chunk that samples."""
        from mini_engine.engine.sampled import Sampled

        self.computed += sum(chunk.stop - chunk.start for chunk in chunks)
        return [Sampled(WORD, None) for chunk in chunks if chunk.samples]

    def step(self) -> None:
        chunks = self.scheduler.schedule()
        requests = [chunk.request for chunk in chunks]
        sampled = self.recorder.run(chunks)
        self.scheduler.update(chunks, sampled)
        ended = [request.id for request in requests if request.is_finished]
        show(self.tape, self.steps, self.recorder, self.came, self.gone, ended)
        frame = self.tape.frames[-1]
        frame["counters"] = self.counters()
        frame["say"] = " ".join([*self.refused, frame["say"]])
        if self.gone:
            frame["code"] = f"{SCHEDULER}.finish"  # no engine is around this scheduler
        self.came, self.gone, self.refused = [], [], []
        self.steps += 1

    def counters(self) -> dict[str, Any]:
        states = self.scheduler.manager.blocks_by_state
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "preempted so far": self.scheduler.num_preemptions,
            "tokens computed": self.computed,
            "blocks held": f"{states.held} of {states.free + states.held}",
        }


LAB = Lab(
    name="batch",
    title="Your own batch",
    kind="timeline",
    prompt="sizes",
    example="8,4",
    verbs={"+": "Arrive", ".": "Run a step", "*": "Run to the end", "-": "Abort"},
    knobs=(
        Knob("blocks", "blocks", 9, 4, 24),
        Knob("size", "block size", 4, 1, 8),
        Knob("budget", "token budget of a step", 8, 6, 16),
        Knob("chunk", "largest chunk of a prompt", 16, 1, 16),
        Knob("seats", "requests at once", 4, 1, 6),
        Knob("promise", "admission promises room for", "known tokens", choices=("known tokens", "the whole answer")),
        Knob("policy", "policy", "fcfs", choices=("fcfs", "priority")),
    ),
    presets=(
        Preset("A long prompt arrives while others decode: do they stall?", "+A=4,12;+B=3,12;.;.;+C=24,3;*",
               {"blocks": 16}),
        Preset("Which request gives way when the pool runs out?", "+A=6,11;+B=5,11;.;+C=7,9;*", {}),
        Preset("What if each admission is promised its whole answer?", "+A=6,11;+B=5,11;.;+C=7,9;*",
               {"promise": "the whole answer"}),
        Preset("May an urgent request overtake?", "+A=8,6,5;+B=8,6,5;.;+C=4,3,0;*", {"policy": "priority", "seats": 2}),
    ),
    modules=("mini_engine/kv/manager.py", "mini_engine/engine/scheduler.py"),
    world=Batch,
    lesson="l5_scheduler",
    rules=batch_rules,
    code=(SCHEDULER, *(f"{SCHEDULER}.{name}" for name in ("add", "finish", "preempt", "admit", "continue_running"))),
)  # fmt: skip
