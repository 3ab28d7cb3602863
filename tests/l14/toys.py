"""Lesson 14. Shared by the tests: a model whose next token depends on the last one only, and engines around it."""

import torch

from mini_engine.checkpoint.config import Qwen3Config
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.sampled import Sampled
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.kv.cache_coordinator import caching_manager
from mini_engine.speculation.options import Speculation
from mini_engine.speculation.speculator import Speculator, speculator_of

VOCAB = 12
EOS = 0
ANY_LOAD = 2**20  # rows: guess however many requests decode


class ChainRunner:
    """A model in place of which `logits[t]` is the row behind token t. Its KV is the token in each slot.

    Like attention, a row is right only if the KV of all tokens before it is: `run` checks every slot that it reads.
    """

    def __init__(self, logits, block_size=4):
        self.logits, self.block_size = logits, block_size
        self.slots, self.during = {}, lambda: None  # `during` is called in the middle of each step

    def run(self, chunks):
        tokens = []
        for chunk in chunks:
            ids = [*chunk.request.token_ids[: chunk.start], *chunk.token_ids]
            for position in range(chunk.start, chunk.stop):
                self.slots[self.slot(chunk, position)] = ids[position]
            held = [self.slots.get(self.slot(chunk, position)) for position in range(chunk.stop)]
            assert held == ids, "the KV of an earlier token is missing, or another token's: was wrong KV kept?"
            rows = chunk.num_logits
            tokens += ids[len(ids) - rows :] if rows else []
        self.during()
        return self.logits[tokens].clone()

    def slot(self, chunk, position):
        return chunk.blocks[position // self.block_size] * self.block_size + position % self.block_size


class Always:
    """A drafter that guesses what `guess(request, count)` returns."""

    def __init__(self, guess):
        self.guess = guess

    def propose(self, request, count):
        return list(self.guess(request, count))[:count]


def config_of(vocab=VOCAB):
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    return Qwen3Config(vocab_size=vocab, head_dim=8, max_position_embeddings=512, eos_token_ids=(EOS,), **sizes)


def cycle(length=4, vocab=VOCAB):
    """Return logits of a model that says 1, 2, … `length`, 1, 2, … for ever."""
    logits = torch.zeros(vocab, vocab)
    for token in range(vocab):
        logits[token, token % length + 1] = 9.0
    return logits


def plain_engine(logits, num_blocks=64, manager=caching_manager, decoding=None, **limits):
    """Return lesson 5's engine over a ChainRunner."""
    scheduler = Scheduler(manager(num_blocks, 4), SchedulerConfig(**{"watermark": 0.0} | limits))
    return Engine(config_of(len(logits)), scheduler, ChainRunner(logits), decoding)


def engine_of(logits, speculation=None, drafter=None, **options):
    """Return an engine with speculation over a ChainRunner."""
    speculation = speculation or Speculation(max_rows=ANY_LOAD)
    decoding = Speculator(speculation, drafter) if drafter else speculator_of(speculation, None)
    return plain_engine(logits, decoding=decoding, **options)


def greedy(max_tokens=24, **more):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def drain(engine):
    """Run until no request is left; return the statistics of every step."""
    stats = []
    while engine.has_unfinished:
        stats.append(engine.step().stats)
    return stats


def answers(engine, prompts, params):
    """Return the answers to all prompts, run together."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    requests = [engine.add_request(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, each, strict=True))]
    drain(engine)
    assert all(request.error is None for request in requests), [request.error for request in requests]
    return [request.output_ids for request in requests]


def request_of(prompt_ids, output_ids=(), **params):
    """Return a request that decodes: all but its newest token have KV."""
    request = Request("a", list(prompt_ids), greedy(**params), stop_ids=(EOS,))
    for token in output_ids:
        request.append(Sampled(token, None))
    request.num_computed_tokens = len(request.token_ids) - 1
    return request
