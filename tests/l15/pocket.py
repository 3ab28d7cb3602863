"""Lesson 15. Shared by the tests: engines over pocket-windows, and Hugging Face's answers to compare with."""

import functools

from mini_engine.assembly.build import build_engine
from mini_engine.assembly.loading import load
from mini_engine.checkpoint.shipped import shipped_checkpoint
from mini_engine.engine.sampling_params import SamplingParams
from tests.support import hf_greedy, some_ids

BLOCK, NEW = 8, 12
WINDOW = 23  # of pocket-windows
LENGTHS = (9, 40, 75, 130)  # shorter than a window, and three windows and more
PROMPTS = [tuple(some_ids(length, 2000, seed=length)) for length in LENGTHS]


def directory():
    """Return the checkpoint's directory."""
    return shipped_checkpoint("pocket-windows")


@functools.cache
def model():
    """Return our model."""
    return load(directory(), "float32", "cpu")


@functools.cache
def hugging_face():
    """Return Hugging Face's model of the same checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory(), dtype=torch.float32).eval()


@functools.cache
def greedy(prompt, max_tokens=NEW):
    """Return Hugging Face's answer to a prompt on its own; each is computed once per run."""
    return hf_greedy(hugging_face(), list(prompt), max_tokens)


def windows(over=None, **options):
    """Return an engine over pocket-windows, or over another model. What was never written is NaN.

    `auto` layers would take over the model's weights.
    """
    defaults = {"num_blocks": 300, "block_size": BLOCK, "backend": "reference", "kernel": "torch"}
    engine = build_engine(over or model(), **defaults | options)
    for layer in (*engine.runner.pool.kv.K, *engine.runner.pool.kv.V):
        if layer.is_floating_point():
            layer.fill_(float("nan"))
    return engine


def ask(engine, prompts=PROMPTS, max_tokens=NEW, name="r", **params):
    """Add a greedy request for every prompt; the caller runs the steps."""
    chosen = SamplingParams(temperature=0, max_tokens=max_tokens, **params)
    return [engine.add_request(f"{name}{i}", list(ids), chosen) for i, ids in enumerate(prompts)]


def drain(engine):
    """Run steps until every request has ended."""
    while engine.has_unfinished:
        engine.step()


def check_answers(requests, when, max_tokens=NEW):
    """Check that the requests have Hugging Face's answers; return how many prompt tokens each found."""
    for request in requests:
        assert not request.error, f"{when}: {request.error}"
        want = greedy(tuple(request.prompt_ids), max_tokens)
        assert request.output_ids == want, (
            f"{when}: other tokens than Hugging Face's for a prompt of {len(request.prompt_ids)}, of which "
            f"{request.num_cached_tokens} were cached"
        )
    return [request.num_cached_tokens for request in requests]


def check_nothing_is_lost(engine):
    """Check that no block is held by a request that has ended."""
    manager = engine.scheduler.manager
    memory = manager.coordinator.memory
    assert not memory.holds, "a request has ended and still holds windows"
    assert manager.blocks_by_state.held == 0, "blocks leaked"
    assert manager.num_free_blocks == manager.num_usable_blocks, "with no request, all blocks can be had"
