"""Lesson 14. Runs prompts with speculation, at several k and with every kind of step.

Each path reports the guessed tokens, the accepted ones, and the steps that they saved, counted for each request. A path
that accepts nothing is reported as not exercised.
"""

import sys
from functools import partial

from scripts import first_line
from scripts.l9_smoke import why_not
from scripts.smoke.arguments import blocks_for, make_parser, with_prompts
from scripts.smoke.run import Outcome
from scripts.smoke.several import LeftOut, run_several
from scripts.smoke.steps import steps_of

from mini_engine.assembly.build import build_engine
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.engine.stats import Summary
from mini_engine.speculation.options import Speculation

BATCHED = "batched"
DRAFTS = (1, 2, 3, 5, 8)
ANY_LOAD = 2**20  # rows: guess however many requests decode
NOTHING_ACCEPTED = "no guess was accepted"

ANSWERS = {
    "What is a KV cache?": "A KV cache keeps the keys and the values of all earlier tokens. Each new token then "
    "computes only its own key and value, and reads the rest from the cache.",
    "What is paging?": "Paging cuts the cache into blocks of equal size. A request takes a new block only when its "
    "last block is full, and it gives all of its blocks back when it ends.",
}


def asked_twice(question: str) -> str:
    """Return a conversation that repeats a question whose answer the pocket model knows by heart."""
    turn = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return f"{turn}{ANSWERS[question]}<|im_end|>\n{turn}"


def default_prompts() -> list[str]:
    """Return prompts whose answers repeat something, and a story, which does not."""
    from scripts.pocket.prompts import COURSE_PROMPTS

    counting = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12.\n1, 2, 3, 4, 5,"
    week = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Monday, Tuesday,"
    table = "1 times 7 is 7. 2 times 7 is 14. 3 times 7 is 21. 4 times 7 is 28."
    return [*map(asked_twice, ANSWERS), counting, week, table, COURSE_PROMPTS[20]]


def batched(speculation: Speculation, model, prompts, args) -> Outcome:
    """Run all prompts at once."""
    return spoken(engine_for(model, prompts, args, speculation), prompts, args)


def first(model, prompts, args) -> Outcome:
    """Run all prompts at once with the usual k, which is reported in full."""
    outcome = batched(Speculation(max_rows=ANY_LOAD), model, prompts, args)
    outcome.kv["speculation"] = {BATCHED: outcome.kv["speculation"]}
    return outcome


def alone(model, prompts, args) -> Outcome:
    """Run one prompt after the other."""
    engine = engine_for(model, prompts, args, Speculation(max_rows=ANY_LOAD), prefix_caching=False)
    return added([spoken(engine, [ids], args) for ids in prompts])


def chunked(model, prompts, args) -> Outcome:
    """Run prompts in chunks of five tokens, together with decoding requests; drafts share the rest of the budget."""
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=12, chunked_prefill_size=5)
    return spoken(engine_for(model, prompts, args, Speculation(max_rows=ANY_LOAD), limits), prompts, args)


def preempted(model, prompts, args) -> Outcome:
    """Run all prompts in a pool so small that requests are preempted and come back."""
    largest = max(blocks_for(prompts, args))
    num_blocks = 1 + max(largest, sum(len(ids) // args.block_size + 1 for ids in prompts))
    limits, speculation = SchedulerConfig(watermark=0.0), Speculation(max_rows=ANY_LOAD)
    engine = engine_for(model, prompts, args, speculation, limits, num_blocks=num_blocks, prefix_caching=False)
    outcome = spoken(engine, prompts, args)
    return outcome.exercising(engine.scheduler.num_preemptions, "no request was preempted")


def cached(model, prompts, args) -> Outcome:
    """Run all prompts twice: the second time after cached prefixes, with the tree's continuations as guesses."""
    engine = engine_for(model, prompts, args, Speculation(max_rows=ANY_LOAD, use_tree=True))
    first, second = spoken(engine, prompts, args), spoken(engine, prompts, args)
    saved = second.kv["speculation"]["steps_saved"] >= first.kv["speculation"]["steps_saved"]
    return second.exercising(saved, "guesses from the tree saved fewer steps than none")


def layers(backend: str, model, prompts, args) -> Outcome | LeftOut:
    """Run all prompts through one backend's fast layers."""
    engine = partial(engine_for, model, prompts, args, Speculation(max_rows=ANY_LOAD), backend=backend)
    return why_not(backend, model) or spoken(engine(), prompts, args)


def kernel(name: str, model, prompts, args) -> Outcome | LeftOut:
    """Run all prompts through one attention kernel."""
    try:
        engine = engine_for(model, prompts, args, Speculation(max_rows=ANY_LOAD), kernel=name)
    except UserError as why:
        if name == "cpu" and not why_not("packed", model):
            raise
        return str(why)
    return spoken(engine, prompts, args)


OTHERS = {
    **{f"k={k}": partial(batched, Speculation(k, max_rows=ANY_LOAD)) for k in DRAFTS},
    **{path.__name__: path for path in (alone, chunked, preempted, cached)},
    **{f"layers {backend}": partial(layers, backend) for backend in ("torch", "packed")},
    **{f"kernel {name}": partial(kernel, name) for name in ("reference", "torch", "cpu")},
}


def engine_for(
    model, prompts, args, speculation, limits=None, *, num_blocks=None, prefix_caching=True, backend="reference", **more
) -> Engine:
    """Return an engine whose pool holds all prompts and answers, unless `num_blocks` says otherwise."""
    return build_engine(
        model,
        backend=backend,
        num_blocks=num_blocks or 1 + sum(blocks_for(prompts, args)),
        block_size=args.block_size,
        scheduler_config=limits,
        enable_prefix_caching=prefix_caching,
        speculate=speculation,
        **more,
    )


def spoken(engine: Engine, prompts, args) -> Outcome:
    """Run an engine until every prompt is answered."""
    params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
    requests = [engine.add_request(str(index), ids, params) for index, ids in enumerate(prompts)]
    summary = Summary()
    for result in steps_of(engine):
        summary.add_step(result.stats)
    faults = [f"request {request.id} ended with an error: {request.error}" for request in requests if request.error]
    held = engine.scheduler.manager.blocks_by_state.held
    faults += [f"{held} blocks are still held, although every request has ended"] if held else []
    figures = {
        "drafts": summary.num_drafted,
        "accepted": summary.num_accepted,
        "decode_steps": summary.decode_tokens,
        "steps_saved": summary.num_accepted,
    }
    kv = {"layout": "block-tensor", "bytes": engine.runner.pool.bytes, "speculation": figures}
    outcome = Outcome([request.output_ids for request in requests], kv, faults)
    return outcome.exercising(summary.num_accepted, NOTHING_ACCEPTED)


def added(outcomes: list[Outcome]) -> Outcome:
    """Return several outcomes as one."""
    figures = [outcome.kv["speculation"] for outcome in outcomes]
    total = {name: sum(one[name] for one in figures) for name in figures[0]}
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    whole = Outcome([ids for outcome in outcomes for ids in outcome.outputs], {"speculation": total}, faults)
    return whole.exercising(total["accepted"], NOTHING_ACCEPTED)


def arguments():
    return make_parser(first_line(__doc__), block_size=8)


def main(argv=None) -> int:
    parser = arguments()
    return run_several(14, (BATCHED, first), OTHERS, parser, with_prompts(argv, parser, default_prompts()))


if __name__ == "__main__":
    sys.exit(main())
