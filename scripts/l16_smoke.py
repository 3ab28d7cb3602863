"""Lesson 16. Latents in every way that lessons 5 to 14 run a model, expanded and absorbed: the same tokens."""

import sys
from functools import partial

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke import on_device as device_loop
from scripts.smoke.arguments import long_prompt, make_parser
from scripts.smoke.paths import alone, batched, cached, chunked, guesses, if_possible, preempted
from scripts.smoke.run import Outcome
from scripts.smoke.several import run_paths
from scripts.smoke.tiers import disk, host, restart
from scripts.smoke.trial import Trial

from mini_engine.attention.registry import load_kernel
from mini_engine.families.deepseek import FAMILY
from mini_engine.gpu.graphs import no_graph
from mini_engine.latents.reading import expanding_pays
from mini_engine.latents.store import LatentKv


class Latents(Trial):
    """An engine over latents."""

    layout = "block-tensor, latents"


def read(trial: Latents, is_expanded: bool, chunk: int) -> Outcome:
    """Run in chunks so long that they expand the latents of a cached prefix, or so short that they absorb kv_b."""
    engine, ways = trial.engine(chunk=chunk), set()
    trial.ask(engine, [ids[: -(-len(ids) // 4)] for ids in trial.prompts])
    requests, before = trial.add(engine), {}
    for _ in trial.steps(engine):
        for request in requests:
            start, stop = before.get(request, request.num_cached_tokens), request.num_computed_tokens
            before[request] = stop
            if 0 < start < stop - 1:  # a chunk, and latents before it
                ways.add(expanding_pays(trial.model.config, stop - start, stop))
    said = "expanded" if is_expanded else "absorbed"
    return trial.outcome(engine, requests).exercising(is_expanded in ways, f"no latents before a chunk were {said}")


def on_device(trial: Latents) -> Outcome:
    """Run without an engine, in lesson 10's loop."""
    config = trial.model.config
    kernel = load_kernel("torch", trial.args.device, trial.model.dtype, latents=True)
    return device_loop.on_device(trial, config, kernel, partial(LatentKv, config))


PATHS = {
    "alone": alone,
    "batched": batched,
    **{f"chunks of {size}": partial(chunked, chunk=size) for size in (1, 7, 16)},
    "preempted": partial(preempted, tight=True),
    "cached prefix": cached,
    "speculation": guesses,
    "host": host,
    "packed layers": partial(if_possible, backend="packed"),
    "kernel blockwise": partial(if_possible, kernel="blockwise"),
    "expanded": partial(read, is_expanded=True, chunk=512),
    "absorbed": partial(read, is_expanded=False, chunk=16),
}
MORE = {"disk": disk, "restart": restart, "torch layers": partial(if_possible, backend="torch")}
MORE |= {"padded": partial(batched, capture=no_graph), "on device": on_device}
MORE |= {f"kernel {name}": partial(if_possible, kernel=name) for name in ("reference", "torch", "cpu")}


def arguments():
    also = "also run from disk and with every kernel"
    family = {"load_model": FAMILY.load, "default_model": "pocket-latent"}
    return make_parser(__doc__, block_size=8, kernel=True, also=also, **family)


def main(argv=None) -> int:
    return run_paths(16, Latents, PATHS, arguments(), argv, [long_prompt(12), *COURSE_PROMPTS[1::5]], MORE)


if __name__ == "__main__":
    sys.exit(main())
