"""Course machinery. Random hybrid checkpoints whose layers remember, and Hugging Face's answers to compare with."""

import functools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from mini_engine.assembly.layout import kv_shape
from mini_engine.attention.registry import load_kernel
from mini_engine.engine.engine import Engine
from mini_engine.engine.request import Request
from mini_engine.engine.runner import plan_step
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler import Chunk
from mini_engine.families.qwen3_5 import FAMILY as QWEN3_5
from mini_engine.hybrid.gdn_pool import GdnPool
from mini_engine.hybrid.hybrid_config import HybridConfig
from mini_engine.hybrid.plan import with_states
from mini_engine.hybrid.store import HybridKv, HybridMeta
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.model.causal_lm import CausalLM
from tests.support import BASE as DENSE
from tests.support import hf_greedy, hugging_face, new_folder, small_engine

if TYPE_CHECKING:
    from transformers import Qwen3_5ForCausalLM

LINEAR, FULL = "linear_attention", "full_attention"
BASE = DENSE | dict(
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=12,
    linear_value_head_dim=20,
    full_attention_interval=4,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
)
# Each family varies what a wrong index would confuse: D_k and D_v, H_v / H_k, which layers attend, the head.
FAMILIES = {
    "every fourth attends": {},
    "every second, one value head a key head, tied": dict(
        full_attention_interval=2, linear_num_key_heads=4, tie_word_embeddings=True
    ),
    "every third, four value heads a key head, wide keys": dict(
        num_hidden_layers=6,
        full_attention_interval=3,
        linear_num_key_heads=1,
        linear_key_head_dim=24,
        linear_value_head_dim=8,
    ),
    "one delta net, first": dict(num_hidden_layers=3, layer_types=[LINEAR, FULL, FULL]),
    "one delta net, last": dict(num_hidden_layers=3, layer_types=[FULL, FULL, LINEAR], linear_conv_kernel_dim=3),
}
# The first two show most; the others make a lesson's check take minutes.
QUICK = ("every fourth attends", "one delta net, last")
SELECTED = [family if family in QUICK else pytest.param(family, marks=pytest.mark.nightly) for family in FAMILIES]


def write_hybrid(directory: Path, seed: int = 0, architecture: str = "Qwen3_5", **changes) -> Path:
    """Write a random hybrid to `directory` with transformers, with Mamba's time steps and non-trivial norms."""
    from scripts.pocket.models import start_time_steps

    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}TextConfig")(**BASE | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    start_time_steps(model)
    for name, parameter in model.named_parameters():
        if "linear_attn.norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif "norm" in name:
            parameter.data.uniform_(-0.5, 0.5)  # around 0: what is added to 1
    model.save_pretrained(directory)
    return directory


@functools.cache
def checkpoint(family: str) -> Path:
    """Return the checkpoint of one family, written once per run."""
    return write_hybrid(new_folder(), **FAMILIES[family])


@functools.cache
def both(family: str, dtype: torch.dtype = torch.float32) -> tuple[CausalLM, "Qwen3_5ForCausalLM"]:
    """Return (our model, Hugging Face's) on the CPU, from the same checkpoint."""
    path = checkpoint(family)
    return QWEN3_5.load(path, dtype), hugging_face(path, dtype)


def greedy(family: str, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    """Return Hugging Face's answer to a prompt on its own; each is computed once per run."""
    return hf_greedy(both(family)[1], list(prompt), max_new_tokens)


def store_of(config: HybridConfig, slots: int, dtype: torch.dtype = torch.float32) -> HybridKv:
    """Return an empty store of 16 tokens and so many states."""
    kv = KvPool(kv_shape(config), 2, 16, load_kernel("reference"), dtype)
    return HybridKv(kv, GdnPool.for_model(config, slots, dtype=dtype))


def plan_of(*lengths: int, slots: Sequence[Sequence[int]] = ()) -> HybridMeta:
    """Return a plan in which sequences of these lengths have these slots, or 1, 2, ….; attention is not asked."""
    empty = torch.zeros(sum(lengths), dtype=torch.int64)
    slots = slots or [[1 + i] for i in range(len(lengths))]
    return with_states(ForwardMeta(*[empty] * 5, block_size=8), slots, lengths)


@torch.inference_mode()
def first_logits(family: str, ids: list[int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (our logits, Hugging Face's) of all tokens of one prompt, computed in one step from an empty store."""
    model, hf = both(family, dtype)
    size = 16
    kv = KvPool(kv_shape(model.config), 2 + len(ids) // size, size, load_kernel("reference"), dtype)
    store = HybridKv(kv, GdnPool.for_model(model.config, 1, dtype=dtype))
    request = Request("r", ids, SamplingParams(temperature=0, max_tokens=1))
    step = plan_step([Chunk(request, 0, len(ids), array("i", range(1, 2 + len(ids) // size)))], size, store.device)
    logits = model(step.token_ids, store, with_states(step.meta, [[1]], [len(ids)]))
    return logits, hf(torch.tensor([ids])).logits[0]


def hybrid(family: str, **options) -> Engine:
    """Return an engine over a family's model: blocks of 8 tokens, a checkpoint every 32."""
    defaults = dict(num_blocks=400, max_track_slots=24, checkpoint_interval=32)
    return small_engine(both(family)[0], **defaults | options)


def check_nothing_is_lost(engine: Engine) -> None:
    """Check that no slot, checkpoint or block is held by a request that has ended."""
    manager = engine.scheduler.manager
    memory = manager.coordinator.memory
    states = memory.states
    assert sorted(memory.free_slots) == list(range(1, states.max_reqs + 1)), "working slots leaked"
    assert set(memory.checkpoints.slots.values()) == states.held_track_slots, "a checkpoint slot belongs to no node"
    assert len(states.held_track_slots) + len(states.free_track_slots) == states.max_track_slots
    assert manager.blocks_by_state.held == 0, "blocks leaked"
    working = states.recurrent_state[:, 1 : states.max_reqs + 1]
    assert not working.any(), "a free slot still has a state: zero it when its request ends or is preempted"
