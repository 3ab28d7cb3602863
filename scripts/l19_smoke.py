"""Lesson 19. Prompts computed by a prefill worker, in every way that lessons 5 to 18 run a model: the same tokens.

`--model` also takes hybrids, windows and latents: pocket-hybrid, pocket-windows, pocket-latent.
"""

import sys
from functools import partial

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke import paths, tiers
from scripts.smoke.arguments import long_prompt, make_parser
from scripts.smoke.handed_over import HandedOver
from scripts.smoke.run import Outcome
from scripts.smoke.several import run_paths

from mini_engine.assembly.loading import load


def batched(trial: HandedOver) -> Outcome:
    """Run all prompts together while others, computed here, are being answered."""
    engine = trial.engine()
    for ids in trial.prompts[:2]:
        trial.add(engine, [ids[: paths.CHUNK]], max_tokens=trial.args.max_new_tokens + len(ids))
    while not all(request.output_ids for request in trial.requests):
        engine.step()
    return trial.run(engine).exercising(trial.num_mixed, "no answer went on while a prompt was on its way")


def chunked(trial: HandedOver) -> Outcome:
    """Run all prompts together; their first blocks arrive while the rest is being computed."""
    return paths.batched(trial).exercising(trial.num_partial, "no prompt arrived in parts")


def cached(trial: HandedOver) -> Outcome:
    """Run the prompts again when both sides have cached them, and once more when only the worker has."""
    engine = trial.engine()
    trial.ask(engine)
    again = trial.ask(engine)
    num_here = sum(request.num_cached_tokens for request in again) - trial.brought
    engine.scheduler.manager.coordinator.clear()
    done = trial.run(engine).repeating(again, "the second answers differ from the third")
    done.exercising(num_here > 0, "no prompt found a prefix here")
    return done.exercising(trial.brought, "the worker's cache was not asked")


def cancelled(trial: HandedOver) -> Outcome:
    """Abort every request while its prompt is in transit, and ask again at once."""
    engine = trial.engine()
    for ids in trial.prompts:
        [request] = trial.add(engine, [ids])
        engine.step()
        engine.abort(request.id)
    return trial.run(engine).exercising(trial.since("cancelled"), "every prompt arrived before it was cancelled")


def part(trial: HandedOver) -> Outcome:
    """Give the worker too few buffers for a prompt: the rest is computed here."""
    done, size = paths.batched(trial, small=True), trial.args.block_size
    whole = sum((len(ids) - 1) // size * size for ids in trial.prompts)
    return done.exercising(trial.brought < whole, "the buffers were enough for every prompt")


def host(trial: HandedOver) -> Outcome:
    """Run all prompts, drop the pool's cache, and run them again with the KV in host memory."""
    return tiers.host(trial, small=True).requiring(not trial.brought, "a worker computed what host memory has")


PATHS = {"alone": paths.alone, "batched": batched, "chunked": chunked, "preempted": paths.preempted, "cached": cached}
PATHS |= {"cancelled": cancelled, "part": part, "guesses": partial(paths.guesses, small=True), "host": host}
PATHS |= {"int8": partial(paths.rounded, kv_dtype="int8", backend="reference", kernel="reference")}
PATHS |= {"ranks": partial(paths.if_possible, tensor_parallel_size=2)}  # each takes its share of the heads
arguments = partial(make_parser, __doc__, block_size=8, load_model=load)


def main(argv=None) -> int:
    return run_paths(19, HandedOver, PATHS, arguments(), argv, [long_prompt(6), *COURSE_PROMPTS[-3:]])


if __name__ == "__main__":
    sys.exit(main())
