"""Lesson 13. Cuts a model so that each process has a share of every matrix (Shoeybi et al., 2019, arXiv:1909.08053).

Attention heads are independent, and so are the columns of a feed-forward block. So q, k, v, gate and up are cut by
columns and need no exchange; o and down are cut by rows, and their results are added over all ranks: two all-reduces a
layer. Norms, embedding and vocabulary head are whole in every rank.
"""

import math
from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from mini_engine.config import Qwen3Config
from mini_engine.errors import UserError
from mini_engine.model.qwen3 import Qwen3ForCausalLM

BY_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
BY_ROWS = ("self_attn.o_proj", "mlp.down_proj")
SHARED = ("num_key_value_heads", "num_attention_heads", "intermediate_size")


def share_of(config: Qwen3Config, num_ranks: int) -> Qwen3Config:
    """Return the configuration of one rank's part: what its pool is made for.

    Each rank has an equal part of the key heads, the query heads and the columns of the feed-forward block, the
    numbers in SHARED. All else is whole in every rank.

    Raises:
        UserError: there is less than one rank, or one of the three cannot be divided evenly. It says which numbers of
            ranks are possible, that is, divide all three.
    """
    whole = {name: getattr(config, name) for name in SHARED}
    least = math.gcd(*whole.values())
    if num_ranks < 1 or least % num_ranks:
        name = next((name for name in whole if num_ranks < 1 or whole[name] % num_ranks), SHARED[0])
        allowed = ", ".join(str(n) for n in range(1, least + 1) if least % n == 0)
        raise UserError(
            f"{num_ranks} ranks cannot share {name} = {whole[name]} evenly; choose one of {allowed}",
            param="tensor_parallel_size",
        )
    return replace(config, **{name: size // num_ranks for name, size in whole.items()})


def shard(model: Qwen3ForCausalLM, mesh: DeviceMesh) -> Qwen3ForCausalLM:
    """Keep only this rank's share of the model's matrices. Its forward pass then takes part in the other ranks'."""
    plan: dict[str, ParallelStyle] = {f"model.layers.*.{name}": ColwiseParallel() for name in BY_COLUMNS}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in BY_ROWS}
    parallelize_module(model, mesh, plan, src_data_rank=None)  # each rank cuts what it has read itself
    return model


def bytes_per_step(config: Qwen3Config, num_tokens: int, itemsize: int) -> int:
    """Return the bytes that each rank brings to the all-reduces of a step.

    There are two in each layer, of `[num_tokens, hidden_size]` numbers of `itemsize` bytes each. The number of ranks
    does not matter.
    """
    return 2 * config.num_hidden_layers * num_tokens * config.hidden_size * itemsize
