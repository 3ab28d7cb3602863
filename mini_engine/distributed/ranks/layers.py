"""Lesson 13. The layers of a rank: those of every other model here, with their partial sums added over all ranks."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from mini_engine.distributed.ranks.shard import BY_ROWS
from mini_engine.layers.exchange import Exchange, Summed


def add_up(x: Tensor) -> Tensor:
    """Add x `[T, hidden_size]` over all ranks, in place, and return it. Each rank waits for all others here."""
    dist.all_reduce(x)
    return x


def with_layers(model: Any, backend: str, exchange: Exchange = add_up) -> Any:
    """Return a rank's model with the layers of this backend. It takes over the weights of `model`.

    Every rank must ask for the same backend: one that added up in other places would wait for the others forever.

    Raises:
        UserError: the backend does not work here.
    """
    if backend == "reference":
        return with_sums(model, exchange)
    if model.config.has_states:
        from mini_engine.hybrid.fast import speed_up_hybrid

        return speed_up_hybrid(model, backend, exchange)
    from mini_engine.layers import speed_up

    return speed_up(model, backend, exchange)


def with_sums(model: nn.Module, exchange: Exchange) -> nn.Module:
    """Return the model, the sums of its matrices that are cut by rows completed by `exchange`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in BY_ROWS:
                setattr(module, name, Summed(child, exchange))
    return model
