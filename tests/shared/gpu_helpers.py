"""Lesson 10. Test helpers: a graph that is recorded and replayed on the CPU, and a kernel for it.

A CUDA graph replays kernels with the addresses and numbers it was recorded with. `TapeCapture` does the same with torch
operations: it records each with its arguments and replays them on the same tensors, without running the model's Python
again. So whatever a real graph would freeze is frozen here too.
"""

from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mini_engine.attention.contract import EVERY_KEY
from mini_engine.attention.registry import load_kernel
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import ModelRunner
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Scheduler
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.gpu.graphs import GraphRunner, no_graph
from mini_engine.kv.block_tensor import KvPool
from mini_engine.kv.manager import KvCacheManager

READS_A_VALUE = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "nonzero"}


class NoReading(TorchFunctionMode):
    """Rejects every function that brings a value from the device to Python: it cannot be captured in a graph."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS_A_VALUE:
            raise AssertionError(f"Tensor.{name} reads a value, which cannot be captured in a graph")
        return func(*args, **kwargs or {})


class Tape(TorchDispatchMode):
    """Records every operation while it is active: function, arguments, results."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **kwargs or {})
        self.ops.append((func, args, kwargs or {}, results))
        return results

    def replay(self):
        """Repeat every operation on the same tensors."""
        for func, args, kwargs, results in self.ops:
            again = func(*args, **kwargs)
            if func._schema.is_mutable:
                continue
            inputs = {_place(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and _place(old) not in inputs:  # a view already has its new values
                    old.copy_(new)


def _place(tensor):
    return tensor.untyped_storage().data_ptr()


class TapeCapture:
    """A capture for the CPU. `runs` counts how often the work has run: once to warm up, once to record.

    On a GPU lesson 2's `check_slots` reads no slot, so it is switched off during recording.
    """

    def __init__(self):
        self.runs = 0

    def __call__(self, work):
        work()
        tape = Tape()
        with NoReading(), tape, mock.patch("mini_engine.kv.block_tensor.check_slots"):
            work()
        self.runs += 2
        return tape.replay


class Counting:
    """Wraps a capture; counts captures and lists replays in order."""

    def __init__(self, capture=no_graph):
        self.capture, self.captured, self.replayed = capture, 0, []

    def __call__(self, work):
        number, replay = self.captured, self.capture(work)
        self.captured += 1

        def counted():
            self.replayed.append(number)
            replay()

        return counted


def masked_attention(q, k_cache, v_cache, batch, scale, window=EVERY_KEY):
    """Lesson 3's contract for decode steps with fixed shapes: no loop and no `if` depends on a length.

    Keys that are not seen, such as those behind lesson 15's window, may be NaN.
    """
    cu_seqlens_q, seq_lens_kv, block_table = batch
    has_query = cu_seqlens_q[1:] > cu_seqlens_q[:-1]
    k, v = (cache[block_table.long()].flatten(1, 2) for cache in (k_cache, v_cache))  # [S, reach, H_kv, D]
    position = torch.arange(k.shape[1], device=q.device)[None]
    seen = (position < seq_lens_kv[:, None]) & (position >= seq_lens_kv[:, None] - window)
    groups = q.shape[1] // k.shape[2]
    k, v = (torch.where(seen[:, :, None, None], x, 0).repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("shd,skhd->shk", q, k) * scale
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    out = torch.einsum("shk,skhd->shd", weights, v)
    return torch.where(has_query[:, None, None], out, 0)


def recordable(*inputs, window=EVERY_KEY):
    """As `masked_attention` for decode steps; prompts, which are not recorded, by the reference kernel."""
    if len(inputs[0]) == len(inputs[3].seq_lens_kv):
        return masked_attention(*inputs, window)
    return load_kernel("reference", window=window).paged_attention(*inputs)


class Decoding:
    """The part of a request that a decode step reads."""

    needs_prompt_logprobs = False

    def __init__(self, length):
        self.token_ids = list(range(1, length + 1))


def graph_engine(model, capture, kernel, num_blocks=64, block_size=4, **limits):
    """Return an engine whose runner replays. The null block and every slot not yet written hold NaN."""
    config = SchedulerConfig(**({"max_num_seqs": 12, "max_num_batched_tokens": 64, "watermark": 0} | limits))
    pool = KvPool(model.config, num_blocks, block_size, kernel)
    runner = GraphRunner(ModelRunner(model, pool), config.max_num_seqs, capture)
    for tensor in (*pool.K, *pool.V):
        tensor.fill_(float("nan"))
    manager = KvCacheManager(num_blocks, block_size, pool.copy_blocks)
    return Engine(model.config, Scheduler(manager, config), runner)


def answers(engine, prompts, max_tokens=8):
    """Return an engine's greedy answers to all prompts, batched."""
    requests = [
        engine.add_request(
            f"r{i}", prompt, SamplingParams(temperature=0, max_tokens=max_tokens + i % 3, ignore_eos=True)
        )
        for i, prompt in enumerate(prompts)
    ]
    while engine.has_unfinished:
        engine.step()
    assert [request.error for request in requests] == [None] * len(requests)
    return [request.output_ids for request in requests]
