"""Course machinery. Suite `ladder`: the gain of each lesson, all on the same work and with the same tokens.

    python scripts/bench.py ladder                    # a table
    python scripts/bench.py ladder --plot mine.svg    # and a picture
    python scripts/bench.py ladder --write            # update page, picture and figures in lessons/ladder

Lessons 4, 6 and 7 are not about speed: a second table shows what they cost.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench import rungs
from scripts.bench.common import Report, left_out
from scripts.bench.options import add_dtype, add_model, model_of, numbers
from scripts.bench.rungs import Load, Pass
from scripts.bench.turns import Timing, take_turns
from scripts.smoke.arguments import pick_device

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import DTYPES
from mini_engine.cli.parser import whole_number
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.kv.manager import KvCacheManager
from mini_engine.layers import speed_up
from mini_engine.text.tokenizer import Tokenizer

RUNGS = {
    0: "no cache",
    1: "contiguous",
    2: "token-flat",
    3: "paged, packed",
    5: "continuous batching",
    8: "prefix sharing",
    9: "fast layers",
}
REQUESTS, COMMON, OWN, ANSWER, SHARE = 24, 192, 160, 64, 0.4
GREEDY, SAMPLED, STREAMED, OVER_HTTP = (
    "5 greedy tokens",
    "4 sampling, top-p 0.9",
    "6 text, streamed",
    "7 over HTTP, streamed",
)
QUICK = dict(requests=6, common=32, own=32, answer=12)


def add_arguments(parser) -> None:
    """Add this suite's options."""
    add_model(parser)
    add_dtype(parser, "float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--lessons", type=numbers(RUNGS), metavar="0,1,…", help="default: all that run here")
    parser.add_argument("--requests", type=whole_number(1), metavar="N", help=f"default: {REQUESTS}")
    parser.add_argument("--write", action="store_true", help="update page, picture and figures in lessons/ladder")


def load_of(args: Namespace, vocab_size: int) -> Load:
    """Return the load, a smaller one with --quick."""
    sizes = dict(requests=REQUESTS, common=COMMON, own=OWN, answer=ANSWER) | (QUICK if args.quick else {})
    if args.requests:
        sizes["requests"] = args.requests
    return rungs.make_load(vocab_size=vocab_size, share=SHARE, **sizes)


def build(lesson: int, model, reload: Callable[[], Any], load: Load) -> Callable[[], Pass]:
    """Return a function that runs the load as that lesson does.

    Raises:
        UserError: the lesson cannot run here.
    """
    ways: dict[int, Callable[[], Callable[[Load], Pass]]] = {
        0: lambda: rungs.lesson_0(model),
        1: lambda: rungs.lesson_1(model, load),
        2: lambda: rungs.lesson_2(model, load),
        3: lambda: rungs.lesson_3(model, load),
        5: lambda: rungs.engine_rung(model, load, KvCacheManager),
        8: lambda: rungs.engine_rung(model, load, caching_manager),
        9: lambda: rungs.engine_rung(speed_up(reload()), load, caching_manager),
    }
    run = ways[lesson]()
    return lambda: run(load)


def ready_rungs(args, model, reload, load) -> dict[int, Callable[[], Any]]:
    """Return the lessons that run here. A lesson named on the command line must run."""
    ready = {}
    for lesson in args.lessons or RUNGS:
        try:
            ready[lesson] = build(lesson, model, reload, load)
        except UserError as why:
            if args.lessons:
                raise
            left_out(f"lesson {lesson}", why)
    return ready


def run(args) -> Report:
    """Measure every lesson on the same work.

    Raises:
        UserError: two lessons gave different tokens, so their figures are not comparable.
    """
    if args.write and (args.quick or args.lessons):
        raise UserError("--write updates the page from a full run; leave out --quick and --lessons")

    def reload():
        return load_model(model_of(args), DTYPES[args.dtype], pick_device(args.device))

    model = reload()
    load = load_of(args, model.config.vocab_size)
    ready = ready_rungs(args, model, reload, load) | (costing(args, model, load) if not args.lessons else {})
    rounds = args.rounds or (1 if args.quick else 3)
    passes = {rung: [] for rung in ready}
    contenders = {rung: lambda rung=rung: passes[rung].append(ready[rung]()) for rung in ready}
    timings = take_turns(contenders, rounds, "ladder")
    check_equal({rung: found for rung, found in passes.items() if rung != SAMPLED})
    per_token = model.config.kv_bytes_per_token(model.dtype)
    rows, before = [], None
    for lesson in [rung for rung in timings if rung in RUNGS]:
        rows.append(row(lesson, timings[lesson], before, passes[lesson][1:], load, per_token))
        before = timings[lesson]
    notes = [
        f"{args.model or 'the pocket model'}, {args.dtype} on {pick_device(args.device)}: {len(load.jobs)} requests "
        f"arriving at once, {load.prompt_tokens} prompt tokens, {load.new_tokens} new tokens; "
        f"a pool of {load.pool_blocks} blocks of 16",
        f"all lessons gave the same {load.new_tokens} tokens; medians of {rounds} interleaved rounds",
    ]
    return Report("ladder", rows, notes, more=costs(timings, load, args))


def costing(args, model, load) -> dict[str, Callable[[], Any]]:
    """Return the runs of lessons 4 and 6 on lesson 5's engine, and its greedy run to compare with."""
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=0)
    ways = {GREEDY: rungs.offline_rung(model, load), SAMPLED: rungs.offline_rung(model, load, drawn)}
    try:
        ways[STREAMED] = rungs.text_rung(model, load, Tokenizer(model_of(args)))
    except UserError as why:
        left_out("lesson 6", why)
    return {name: lambda way=way: way(load) for name, way in ways.items()}


def costs(timings: dict, load, args) -> list[dict[str, Any]]:
    """Return the second table, relative to lesson 5's greedy run in the same rounds. HTTP has its own load."""
    rows = [
        {"lesson": name, "new tokens/s": rounded(load.new_tokens / timing.median), "± %": rounded(timing.spread * 100)}
        | {"% left": rounded(100 * timings[GREEDY].median / timing.median)}
        for name, timing in timings.items()
        if name not in RUNGS
    ]
    if rows and not args.quick and args.device == "cpu":
        rows += http_costs(args)
    return rows


def http_costs(args) -> list[dict[str, Any]]:
    """Measure lesson 7 on its own load, as scripts/l7_load.py does."""
    from scripts import l7_load

    try:
        speed, _ = l7_load.measure(Namespace(model=args.model, requests=50, max_new_tokens=64, rounds=3))
    except ImportError as error:
        left_out("lesson 7", error)
        return []
    streamed, offline = speed["HTTP, streamed"], speed["LLM.generate"]
    share = rounded(100 * streamed / offline)
    return [{"lesson": OVER_HTTP, "new tokens/s": rounded(streamed), "± %": None, "% left": share}]


def check_equal(passes: dict[int | str, list]) -> None:
    """Check that all lessons gave the same tokens."""
    first, *others = passes
    for lesson in others:
        for done in passes[lesson]:
            if done.answers != passes[first][0].answers:
                wrong = sum(a != b for a, b in zip(done.answers, passes[first][0].answers, strict=True))
                raise UserError(
                    f"lesson {lesson} answers {wrong} of {len(done.answers)} requests differently from lesson {first}; "
                    "only equal answers are compared (in bfloat16 a near-tie may cause the difference)"
                )


def row(lesson: int, timing: Timing, before: Timing | None, passes: list, load, per_token: int) -> dict[str, Any]:
    """Return a lesson's row: medians over the rounds; figures that do not depend on time come from the last round."""
    found = [done.figures(load, per_token) for done in passes]
    last = found[-1]
    return {
        "lesson": f"{lesson} {RUNGS[lesson]}",
        "new tokens/s": rounded(load.new_tokens / timing.median),
        "± %": rounded(timing.spread * 100),
        "× before": rounded(before.median / timing.median) if before else None,
        "first token, s": rounded(median(each["first_token_s"] for each in found)),
        "at once": rounded(last["running"]),
        "KV held, MiB": rounded(last["kv_mib"]),
        "KiB a request": rounded(last["kv_kib_a_request"]),
        "waste %": None if last["waste"] is None else rounded(last["waste"] * 100),
        "prefill tokens": last["prefill_tokens"],
    }


def rounded(value: float) -> float:
    """Round to four significant figures; the rest is noise."""
    return float(f"{value:.4g}")


def draw(report: Report, path: Path) -> None:
    """Draw the ladder as a picture."""
    from scripts.pages.ladder import draw_ladder

    draw_ladder(report.rows, path)


def finish(report: Report, args) -> int:
    """With --write, update the page, the picture and the figures."""
    if args.write:
        from scripts.pages import generated, ladder

        report.write(ladder.FIGURES)
        return generated.settle(ladder.files(), check=False)
    return 0
