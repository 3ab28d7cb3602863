"""Course machinery. What an engine for users has of lesson 9; nothing where lesson 9 is out of reach."""

from mini_engine.engine.runner import ModelRunner
from mini_engine.kv.block_tensor import KvPool
from mini_engine.model.qwen3 import Qwen3ForCausalLM


def fast_layers(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The model with fast layers if it is on the CPU; where an earlier lesson is proven alone, as it is."""
    if model.device.type != "cpu":
        return model
    try:
        from mini_engine.cpu import speed_up
    except ModuleNotFoundError:
        return model
    return speed_up(model)


def fast_runner(model: Qwen3ForCausalLM, pool: KvPool, max_num_seqs: int) -> ModelRunner:
    """A runner whose decode steps are captured, on a GPU whose kernel allows it; lesson 5's elsewhere."""
    try:
        from mini_engine.gpu.graphs import runner_for
    except ModuleNotFoundError:
        return ModelRunner(model, pool)
    return runner_for(model, pool, max_num_seqs)
