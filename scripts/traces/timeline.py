"""Course machinery. Lesson 5's trace: six requests in one batch, step by step, with chunks, a preemption, an abort."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural, ranges

from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk, Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig

BLOCKS, BLOCK_SIZE, BUDGET = 9, 4, 8
SCHEDULER = "mini_engine/engine/scheduler.py::Scheduler"


@dataclass(frozen=True)
class Job:
    """A request: the step before which it arrives, prompt and answer lengths, the step before which it is aborted."""

    name: str
    arrival: int
    prompt: int
    answer: int
    abort: int | None = None


JOBS = (
    Job("A", 0, 6, 11),
    Job("B", 0, 3, 9),
    Job("C", 2, 15, 4),
    Job("D", 3, 4, 5),
    Job("E", 8, 5, 9, abort=15),
    Job("F", 10, 3, 3),
)
Cells = dict[str, dict[str, Any]]  # each request's work in a step


class Steps(Tape):
    """Steps a scheduler, a frame for each step: the base of the recorder and of lesson 5's lab.

    came, gone: requests that have arrived or been aborted since the last step.
    """

    scheduler: Scheduler
    abort_code = f"{SCHEDULER}.finish"

    def __init__(self, *about: Any, **scene: Any) -> None:
        super().__init__(*about, **scene)
        self.came, self.gone = list[str](), list[str]()
        self.preempted: dict[str, int] = {}
        self.steps = 0

    def compute(self, chunks: Sequence[Chunk]) -> list[Sampled]:
        """Run the model and the sampler."""
        raise NotImplementedError

    def held(self) -> dict[str, int]:
        """Return the number of blocks each request holds."""
        return {name: len(table.blocks) for name, table in self.scheduler.manager.tables.items()}

    def step(self) -> None:
        """Run a step and add it as a frame: each request's blocks before it, and the computed tokens."""
        chunks = self.scheduler.schedule()
        requests = [chunk.request for chunk in chunks]
        cells, held = self.cells_of(chunks), self.held()
        self.scheduler.update(chunks, self.compute(chunks))
        ended = [request.id for request in requests if request.is_finished]
        say = " ".join(filter(None, self.sentences(cells, ended)))
        self.show(say, self.code_of(cells), self.question(cells, held), cells=cells, held=held, ended=ended)
        self.came, self.gone = [], []
        self.steps += 1

    def cells_of(self, chunks: Sequence[Chunk]) -> Cells:
        cells: Cells = {}
        for request in self.scheduler.waiting:
            was_out = request.num_preemptions > self.preempted.get(request.id, 0)
            self.preempted[request.id] = request.num_preemptions
            cells[request.id] = {"kind": "out" if was_out else "waits"}
        for chunk in chunks:
            request = chunk.request
            kind = "decode" if not request.is_prefilling else "again" if request.num_preemptions else "prefill"
            part = {"start": chunk.start, "stop": chunk.stop, "of": len(request.token_ids)}
            cells[request.id] = {"kind": kind, **part}
        return cells | {name: {"kind": "aborted"} for name in self.gone}

    def code_of(self, cells: Cells) -> str:
        """Return the function behind a step's rarest event: an abort, a preemption, a new request."""
        if self.gone:
            return self.abort_code
        is_new = any(cell.get("start") == 0 for cell in cells.values())
        return f"{SCHEDULER}.{'preempt' if of_kind(cells, 'out') else 'admit' if is_new else 'continue_running'}"

    def sentences(self, cells: Cells, ended: list[str]) -> list[str]:
        """Return a sentence for each event in the order of the scheduler's decisions; "" if it did not happen."""
        gone, out = listed(self.gone), listed(of_kind(cells, "out"))
        chunks = [f"{name} {part_of(cells[name])}" for name in of_kind(cells, "prefill")]
        chunks += [f"{name} {part_of(cells[name])} again" for name in of_kind(cells, "again")]
        return [
            f"Step {self.steps}:",
            listed(self.came, "arrives.", "arrive."),
            gone and f"{gone}'s client is gone: aborted, and its blocks are free.",
            out and f"Blocks run out: {out}, the newest, is preempted.",
            listed(of_kind(cells, "decode"), "decodes.", "decode."),
            ", ".join(chunks).replace(" ", " computes ", 1) + "." if chunks else "",
            listed(of_kind(cells, "waits"), "waits.", "wait."),
            listed(ended, "ends.", "end."),
        ]

    def question(self, cells: Cells, held: dict[str, int]):
        """Ask about each of the scheduler's rules once, where it first applies."""
        asked = {frame["ask"]["question"].split(":")[0] for frame in self.frames if "ask" in frame}
        decodes, out, again = (of_kind(cells, kind) for kind in ("decode", "out", "again"))
        cut = [name for name in of_kind(cells, "prefill") if cells[name]["stop"] < cells[name]["of"]]
        if cut and decodes and "The budget" not in asked:
            return budget_question(cut[0], cells[cut[0]], decodes, self.scene["budget"])
        if out and "The pool" not in asked:
            why = "The newest request is preempted: requests that arrived earlier never lose their place to it."
            text = "The pool: the step needs more blocks than are free. Which request is preempted?"
            return ask(text, out[0], [name for name in held if name not in out][:3], why)
        if again and "Back again" not in asked:
            why = "Its blocks were freed, so its KV is lost: the prompt and the answer so far are computed again."
            text = "Back again: the preempted request has room now. Where does it resume?"
            return ask(text, f"at token {cells[again[0]]['start']}", ("where it stopped",), why)
        if self.gone and "The client" not in asked:
            why = "An abort takes effect between two steps and frees everything at once. Other requests are unaffected."
            text = f"The client: {self.gone[0]}'s client disconnects. When are its blocks free?"
            return ask(text, "before this step", ("when its answer would have ended", "after this step"), why)
        return None


class Timeline(Steps):
    """An engine of the pocket model."""

    abort_code = "mini_engine/engine/engine.py::Engine.abort"

    def __init__(self) -> None:
        jobs = [{"name": job.name, "prompt": job.prompt, "answer": job.answer} for job in JOBS]
        scene = {"blocks": BLOCKS, "budget": BUDGET, "jobs": jobs}
        title = "One batch, step by step"
        super().__init__("l5-timeline", "l5_scheduler/batch.trace.js", "timeline", title, 16, **scene)

    def record(self) -> None:
        from mini_engine.engine.engine import Engine  # here, because the lab's page has no tensors

        limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=BUDGET, watermark=0)
        self.engine = engine = Engine.for_model(
            self.model, num_blocks=BLOCKS + 1, block_size=BLOCK_SIZE, kernel="reference", scheduler_config=limits
        )
        self.scheduler = engine.scheduler
        coming = list(JOBS)
        while engine.has_unfinished or coming:
            for job in [job for job in coming if job.arrival == self.steps]:
                coming.remove(job)
                self.came.append(job.name)
                params = SamplingParams(temperature=0, max_tokens=job.answer, ignore_eos=True)
                engine.add_request(job.name, [65 + i for i in range(job.prompt)], params)
            self.gone = [job.name for job in JOBS if job.abort == self.steps and engine.abort(job.name)]
            self.step()

    def compute(self, chunks: Sequence[Chunk]) -> list[Sampled]:
        return self.engine._run(chunks)


def of_kind(cells: Cells, kind: str) -> list[str]:
    return [name for name, cell in cells.items() if cell["kind"] == kind]


def part_of(cell: dict[str, Any]) -> str:
    """Return "tokens 0 … 5 of 15", "all 6 tokens"."""
    start, stop, of = cell["start"], cell["stop"], cell["of"]
    if stop - start == of:
        return f"all {of} tokens"
    return f"{'token' if stop - start == 1 else 'tokens'} {ranges(range(start, stop))} of {of}"


def budget_question(name: str, cell: dict[str, Any], decodes: list[str], budget: int):
    return ask(
        f"The budget: {listed(decodes)} decode, and {name} arrives with {cell['of']} tokens. How many of its tokens "
        "run in this step?",
        cell["stop"] - cell["start"],
        (cell["of"], budget, 1),
        f"Decodes come first: {plural(len(decodes), 'token')}. The rest of the {budget} goes to {name}'s prompt.",
    )
