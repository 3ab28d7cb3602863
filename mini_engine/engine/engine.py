"""Lesson 5. The engine: requests come, steps run, tokens go out, whatever happens to one of them.

    schedule -> run the model -> choose tokens -> update

An engine belongs to one thread. Who wants to add or abort from elsewhere hands that wish to the thread that steps, between
two steps; an abort that comes while a step is in flight in the same thread (from a callback) is honoured by `update`.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.attention.contract import load_kernel
from mini_engine.config import Qwen3Config
from mini_engine.engine.request import FinishReason, Request
from mini_engine.engine.runner import ModelRunner
from mini_engine.engine.sampler import Sampler
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk, Scheduler, SchedulerConfig
from mini_engine.engine.stats import StepStats
from mini_engine.errors import UserError
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.manager import KvCacheManager, blocks_in_budget
from mini_engine.model.qwen3 import Qwen3ForCausalLM

CPU_KV_BYTES = 2**30
GPU_SHARE = 0.8

log = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """What a step gave: request id to new token; the requests that ended, with their reasons; numbers."""

    new_tokens: dict[str, int]
    finished: list[Request]
    stats: StepStats


class Engine:
    """Serves requests in steps. `Engine.for_model(model)` builds one; tests put together their own."""

    def __init__(self, config: Qwen3Config, scheduler: Scheduler, runner: ModelRunner, sampler: Sampler) -> None:
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
