"""Lesson 14. Suite `speculation`: accepted guesses, and speed against lesson 9's, on texts that repeat and on prose.

    accepted   guesses and accepted ones for each load and k, counted without a model; the pocket model's own answers
    speed      tokens/s with and without guesses, at several numbers of sequences; a real model's shape and random
               weights, whose known answers are replayed (replay.py)

"always" guesses at any load; "adaptive", the default, stops when rows are no longer free.
"""

import random
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from scripts.bench.common import Report
from scripts.bench.options import add_batches, add_checkpoint, add_choice, add_threads, checkpoint_of
from scripts.bench.replay import ReplayRunner, Script, loads
from scripts.bench.turns import Timing, clock_of, gather_turns
from scripts.l14_smoke import asked_twice
from scripts.pocket.prompts import COURSE_PROMPTS

from mini_engine.assembly import loading
from mini_engine.assembly.build import build_engine
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import DTYPES
from mini_engine.cli.parser import whole_number
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.manager import KvCacheManager
from mini_engine.pocket import POCKET_DIR
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.speculator import Speculator, speculator_of
from mini_engine.text.tokenizer import Tokenizer

PARTS = ("accepted", "speed")
DRAFTS = (1, 2, 4, 8, 16)
BATCHES = (1, 8, 32)
ALWAYS = 2**20  # rows
NEW_TOKENS = 48
CHANCE = 0.8
ORACLE = f"guesses right with a chance of {CHANCE:.0%}"
OFF, ADAPTIVE, UNLIMITED = "lesson 9", "adaptive", "always"


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_checkpoint(parser)
    add_choice(parser, "parts", PARTS)
    add_choice(parser, "loads", (*loads(), ORACLE))
    add_batches(parser, BATCHES)
    add_threads(parser)
    parser.add_argument("--max-rows", type=whole_number(1), metavar="N", help="of the adaptive contender")


def run(args: Namespace) -> Report:
    """Count accepted guesses, and measure the speed."""
    tokenizer = Tokenizer(POCKET_DIR)
    scripts = {name: Script.of(load, tokenizer) for name, load in loads().items()}
    counted = [*counted_rows(scripts), *pocket_rows(tokenizer)] if "accepted" in args.parts else []
    timed = speed_rows(scripts, args) if "speed" in args.parts else []
    notes = [
        "texts in the pocket model's tokens; tokens a step: of one request while it decodes",
        f"speed: {NEW_TOKENS} replayed tokens an answer; random weights of the {args.shape} shape, {args.dtype}; "
        f"'{ORACLE}' takes them from the known answer; in all other loads they come from the text",
    ]
    if timed:
        return Report("speculation", timed, notes, more=counted)
    return Report("speculation", counted, notes)


# ---------------------------------------------------------------- what is accepted


def counted_rows(scripts: dict[str, Script]) -> list[dict[str, Any]]:
    """Decode every known answer at every k, without a model: acceptance depends only on the text."""
    rows = []
    for name, script in scripts.items():
        for k in DRAFTS:
            limits = SchedulerConfig(chunked_prefill_size=2**15, max_num_batched_tokens=2**15)
            scheduler = Scheduler(KvCacheManager(2**12), limits)
            decoding = speculator_of(Speculation(k, max_rows=ALWAYS), None)
            rows.append({"load": name, "k": k} | play(scheduler, decoding, script))
    return rows


def play(scheduler: Scheduler, decoding: Speculator, script: Script) -> dict[str, Any]:
    """Run one request whose rows choose the known answer's tokens; return its figures."""
    answer = script.answer_ids
    request = Request("0", script.prompt_ids, SamplingParams(temperature=0, max_tokens=len(answer)))
    scheduler.add(request)
    steps = drafted = accepted = 0
    while scheduler.requests:
        chunks, at = decoding.plan(scheduler), len(request.output_ids)
        rows = sum(chunk.num_logits for chunk in chunks)
        decoding.record(scheduler, chunks, [Sampled(answer[at + i], None) for i in range(rows)])
        steps, drafted, accepted = steps + 1, drafted + decoding.num_drafted, accepted + decoding.num_accepted
    return figures(len(answer), steps, drafted, accepted)


def figures(num_tokens: int, steps: int, drafted: int, accepted: int) -> dict[str, Any]:
    """Return the row's figures. The first step is the prefill."""
    return {
        "tokens": num_tokens,
        "steps": steps,
        "guesses": drafted,
        "accepted": accepted,
        "accepted, %": 100 * accepted / drafted if drafted else 0.0,
        "tokens a step": (num_tokens - 1) / (steps - 1) if steps > 1 else 1.0,
    }


POCKET_LOADS = {
    "pocket: the same question again": asked_twice("What is a KV cache?"),
    "pocket: a story": COURSE_PROMPTS[20],
}


def pocket_rows(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Let the pocket model answer, greedily; and once more, when the tree has the answer."""
    rows = []
    for name, prompt in POCKET_LOADS.items():
        settings = Speculation(max_rows=ALWAYS, use_tree=True)
        engine = build_engine(load_model(POCKET_DIR), num_blocks=256, speculate=settings)
        for again in ("", ", sent again"):
            request = engine.add_request(
                "0", tokenizer.encode(prompt), SamplingParams(temperature=0, max_tokens=128, ignore_eos=False)
            )
            stats = []
            while engine.has_unfinished:
                stats.append(engine.step().stats)
            drafted, accepted = sum(s.num_drafted for s in stats), sum(s.num_accepted for s in stats)
            row = {"load": name + again, "k": settings.max_drafts}
            rows.append(row | figures(len(request.output_ids), len(stats), drafted, accepted))
    return rows


def draw(report: Report, path: Path) -> None:
    """Draw the tokens a step by k, a line for each load."""
    from scripts.bench import plot

    lines: dict[str, list[float]] = {}
    for row in report.more or report.rows:
        if "k" not in row:
            raise UserError("only the part 'accepted' can be drawn; add --parts accepted, or leave out --plot")
        if not row["load"].startswith("pocket"):
            lines.setdefault(row["load"], []).append(row["tokens a step"])
    words = [f"{name}: {', '.join(f'{value:.2f}' for value in values)}" for name, values in lines.items()]
    said = f"Tokens a step with up to {', '.join(map(str, DRAFTS))} guesses. {'; '.join(words)}."
    best_first = sorted(lines.items(), key=lambda line: -line[1][-1])
    series = {name: (DRAFTS, values, color) for (name, values), color in zip(best_first, plot.SERIES, strict=False)}
    label, title = "most guesses in a step, k", "tokens a step, one request"
    plot.lines(path, said, series, label, title, DRAFTS, (1, 2, 4, 8), 3.4, marker="o", markersize=4)


# ---------------------------------------------------------------- speed


class OracleDrafter:
    """Guesses from the known answers; each guess is wrong with probability 1 - `right`, always the same ones."""

    def __init__(self, scripts: dict[str, Script], right: float) -> None:
        self.scripts, self.right = scripts, right

    def propose(self, request: Request, count: int) -> list[int]:
        """Return `count` tokens."""
        at, answer = len(request.output_ids), self.scripts[request.id].answer_ids
        return [
            token if random.Random(at + i).random() < self.right else 0
            for i, token in enumerate(answer[at : at + count])
        ]


class Contender:
    """One engine, whose requests all replay one load. steps: of the last run's decoding."""

    def __init__(self, engine: Engine, scripts: dict[str, Script], args: Namespace) -> None:
        self.engine, self.scripts, self.script = engine, scripts, scripts["0"]
        longest = min(NEW_TOKENS, len(self.script.answer_ids))
        self.params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=longest)
        self.clock = clock_of(args)
        self.steps = 0

    def decode(self) -> float:
        """Answer all requests; return the seconds a token of decoding. Prompts' KV is cached after the first time."""
        engine = self.engine
        requests = [engine.add_request(name, self.script.prompt_ids, self.params) for name in self.scripts]
        while not all(request.output_ids for request in requests):
            engine.step()
        started, before = self.clock(), sum(len(request.output_ids) for request in requests)
        self.steps = 0
        while engine.has_unfinished:
            engine.step()
            self.steps += 1
        taken = self.clock() - started
        assert all(request.output_ids == self.script.answer_ids[: self.params.max_tokens] for request in requests)
        return taken / (sum(len(request.output_ids) for request in requests) - before)


def engines(model, max_rows: int | None, name: str, scripts: dict[str, Script]) -> dict[str, Engine]:
    """Return each contender's engine, over one model. With one sequence, guessing never stops."""
    batch = len(scripts)
    tokens = len(scripts["0"].prompt_ids) + batch * (NEW_TOKENS + 32)  # they share the prompt's blocks
    limits = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=4096, watermark=0)

    def engine(speculate: Speculation | None) -> Engine:
        made = build_engine(model, num_blocks=tokens // 16 + 2 * batch, scheduler_config=limits, speculate=speculate)
        decoding = made.decoding
        if speculate and name == ORACLE:
            decoding = Speculator(speculate, OracleDrafter(scripts, CHANCE))
        return Engine(made.config, made.scheduler, ReplayRunner(made.runner, scripts), decoding)

    adaptive = Speculation(max_rows=max_rows) if max_rows else Speculation()
    found = {OFF: engine(None), ADAPTIVE: engine(adaptive)}
    return found if batch == 1 else found | {UNLIMITED: engine(Speculation(max_rows=ALWAYS))}


def speed_rows(scripts: dict[str, Script], args: Namespace) -> list[dict[str, Any]]:
    """Time every load at every number of sequences; the contenders take turns."""
    loaded, rows = loading.load(checkpoint_of(args), DTYPES[args.dtype], "cpu"), []
    model = build_engine(loaded, num_blocks=2).runner.model  # with fast layers, which the contenders share
    scripts = scripts | {ORACLE: scripts["prose"]}
    for batch in args.batches[:1] if args.quick else args.batches:
        for name in args.loads:
            asked = {str(i): scripts[name] for i in range(batch)}
            made = engines(model, args.max_rows, name, asked)
            contenders = {who: Contender(engine, asked, args) for who, engine in made.items()}
            turns = {who: contender.decode for who, contender in contenders.items()}
            timings = gather_turns(turns, args.rounds or (1 if args.quick else 3), f"{name}, {batch} at once")
            rows += batch_rows(name, batch, contenders, timings)
            sys.stderr.write(f"{rows[-1]}\n")
    return rows


def batch_rows(
    load: str, batch: int, contenders: dict[str, Contender], timings: dict[str, Timing]
) -> list[dict[str, Any]]:
    """Return a row for each contender."""
    return [
        {
            "load": load,
            "engine": f"{batch} at once, {who}",
            "tokens a step": (contender.params.max_tokens - 1) / contender.steps,
            "tokens/s": 1 / timings[who].median,
            "± %": timings[who].spread * 100,
            "× lesson 9": timings[OFF].median / timings[who].median,
        }
        for who, contender in contenders.items()
    ]
