"""Course machinery. Lesson 5's trace: six requests in one batch, step by step, with chunks, a preemption, an abort."""

from dataclasses import dataclass
from typing import Any

from scripts.traces.tape import Tape, ask, listed, plural, ranges

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


def tape() -> Tape:
    jobs = [{"name": job.name, "prompt": job.prompt, "answer": job.answer} for job in JOBS]
    scene = {"blocks": BLOCKS, "budget": BUDGET, "jobs": jobs}
    return Tape("l5-timeline", "l5_scheduler/batch.trace.js", "timeline", "One batch, step by step", scene, 16)


class Recorder:
    """Replaces a runner's `run`: records what each step computes and what each request holds, before it runs."""

    def __init__(self, engine) -> None:
        self.engine, self.compute = engine, engine.runner.run
        self.preempted: dict[str, int] = {}

    def run(self, chunks):
        scheduler = self.engine.scheduler
        self.cells: dict[str, dict[str, Any]] = {}
        self.out = []
        for request in scheduler.waiting:
            if request.num_preemptions > self.preempted.get(request.id, 0):
                self.out.append(request.id)
            self.preempted[request.id] = request.num_preemptions
            self.cells[request.id] = {"kind": "out" if request.id in self.out else "waits"}
        for chunk in chunks:
            request = chunk.request
            kind = "decode" if not request.is_prefilling else "again" if request.num_preemptions else "prefill"
            self.cells[request.id] = {
                "kind": kind,
                "start": chunk.start,
                "stop": chunk.stop,
                "of": len(request.token_ids),
            }
        self.held = {name: len(table.blocks) for name, table in scheduler.manager.tables.items()}
        return self.compute(chunks)


def record(tape: Tape) -> None:
    from mini_engine.checkpoint.weights import load_model
    from mini_engine.engine.engine import Engine
    from mini_engine.engine.sampling_params import SamplingParams
    from mini_engine.engine.scheduler import SchedulerConfig
    from mini_engine.pocket import POCKET_DIR

    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=BUDGET, watermark=0)
    engine = Engine.for_model(
        load_model(POCKET_DIR),
        num_blocks=BLOCKS + 1,
        block_size=BLOCK_SIZE,
        kernel="reference",
        scheduler_config=limits,
    )
    recorder = Recorder(engine)
    engine.runner.run = recorder.run
    step, coming = 0, list(JOBS)
    while engine.has_unfinished or coming:
        came, gone = [], []
        for job in [job for job in coming if job.arrival == step]:
            coming.remove(job)
            came.append(job.name)
            params = SamplingParams(temperature=0, max_tokens=job.answer, ignore_eos=True)
            engine.add_request(job.name, [65 + i for i in range(job.prompt)], params)
        for job in JOBS:
            if job.abort == step and engine.abort(job.name):
                gone.append(job.name)
        result = engine.step()
        ended = [request.id for request in result.finished]
        show(tape, step, recorder, came, gone, ended)
        step += 1


def show(tape: Tape, step: int, recorder: Recorder, came: list[str], gone: list[str], ended: list[str]) -> None:
    """Add one step as a frame."""
    cells, held = recorder.cells, recorder.held
    for name in gone:
        cells[name] = {"kind": "aborted"}
    say = " ".join(sentences(step, cells, recorder.out, came, gone, ended))
    asked, code = question(tape, cells, held, recorder.out, gone), code_of(cells, recorder.out, gone)
    tape.frame(say, asked, code, cells=cells, held=held, ended=ended)


def code_of(cells, out, gone) -> str:
    """Return the function behind what is rarest in a step: an abort, a preemption, a new request."""
    if gone:
        return "mini_engine/engine/engine.py::Engine.abort"
    if out:
        return f"{SCHEDULER}.preempt"
    return f"{SCHEDULER}.{'admit' if any(cell.get('start') == 0 for cell in cells.values()) else 'continue_running'}"


def sentences(step, cells, out, came, gone, ended) -> list[str]:
    """Say what happened, in the order of the scheduler's decisions."""
    of_kind = {
        kind: [name for name, cell in cells.items() if cell["kind"] == kind]
        for kind in ("decode", "prefill", "again", "waits")
    }
    said = [f"{listed(came)} {'arrives' if len(came) == 1 else 'arrive'}." if came else ""]
    said += [f"{listed(gone)} is aborted because its client disconnected; its blocks are freed." if gone else ""]
    said += [f"The pool cannot keep all its promises: {listed(out)}, the newest, is preempted." if out else ""]
    if names := of_kind["decode"]:
        each = ", one token each" if len(names) > 1 else ""
        said.append(f"{listed(names)} {'decode' if len(names) > 1 else 'decodes'}{each}.")
    for kind, verb, again in (("prefill", "computes", ""), ("again", "computes", " again")):
        for name in of_kind[kind]:
            cell = cells[name]
            said.append(f"{name} {verb} {part_of(cell)}{again}.")
    said += [
        f"{listed(of_kind['waits'])} {'waits' if len(of_kind['waits']) == 1 else 'wait'}." if of_kind["waits"] else ""
    ]
    said += [f"{listed(ended)} {'has' if len(ended) == 1 else 'have'} ended." if ended else ""]
    total = sum(cell["stop"] - cell["start"] for cell in cells.values() if "stop" in cell)
    return [f"Step {step}:", *filter(None, said), f"{plural(total, 'token')} in total."]


def part_of(cell: dict[str, Any]) -> str:
    """ "tokens 0 … 5 of 15", "all 6 tokens"."""
    start, stop, of = cell["start"], cell["stop"], cell["of"]
    if stop - start == of:
        return f"all {of} tokens"
    return f"{'token' if stop - start == 1 else 'tokens'} {ranges(range(start, stop))} of {of}"


def budget_question(name: str, cell: dict[str, Any], decodes: list[str], budget: int):
    count = cell["stop"] - cell["start"]
    return ask(
        f"The budget: {listed(decodes)} decode, and {name} arrives with {cell['of']} tokens. How many of its tokens "
        "run in this step?",
        count,
        (cell["of"], budget, 1),
        f"Decodes come first: {plural(len(decodes), 'token')}. The rest of the {budget} goes to {name}'s prompt.",
    )


def question(tape: Tape, cells, held, out, gone):
    """Ask about each of the scheduler's rules once, where it first applies."""
    asked = {frame["ask"]["question"].split(":")[0] for frame in tape.frames if "ask" in frame}
    decodes = [name for name, cell in cells.items() if cell["kind"] == "decode"]
    chunk = next(
        ((name, cell) for name, cell in cells.items() if cell["kind"] == "prefill" and cell["stop"] < cell["of"]), None
    )
    if chunk and decodes and "The budget" not in asked:
        return budget_question(*chunk, decodes, tape.scene["budget"])
    if out and "The pool" not in asked:
        others = [name for name in held if name not in out]
        why = "The newest request is preempted: requests that arrived earlier never lose their place to it."
        return ask(
            "The pool: the step needs more blocks than are free. Which request is preempted?", out[0], others[:3], why
        )
    again = next((cell for cell in cells.values() if cell["kind"] == "again"), None)
    if again and "Back again" not in asked:
        why = "Its blocks were freed, so its KV is lost: the prompt and the answer so far are computed again."
        return ask(
            "Back again: the preempted request has room now. Where does it resume?",
            f"at token {again['start']}",
            ("where it stopped",),
            why,
        )
    if gone and "The client" not in asked:
        why = "An abort takes effect between two steps and frees everything at once. Other requests are unaffected."
        return ask(
            f"The client: {gone[0]}'s client disconnects. When are its blocks free?",
            "before this step",
            ("when its answer would have ended", "after this step"),
            why,
        )
    return None
