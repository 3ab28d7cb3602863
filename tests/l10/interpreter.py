"""Lesson 10. The functions that a worker calls where Triton interprets its kernels. A call begins with a name."""

import os

from tests.l3.pickled import answer_calls


def kernel(name, *inputs):
    """Run a kernel; return its result and its inputs afterwards."""
    import torch

    from mini_engine.layers import layer_kernels

    with torch.inference_mode():
        result = getattr(layer_kernels, name)(*inputs)
    return result, inputs


def tokens(directory, prompts, max_tokens, kernel):
    """Return the greedy answers of an engine with fused layers, its decode steps padded to a capture size."""
    from mini_engine.attention.registry import load_kernel
    from mini_engine.families.qwen3 import load_model
    from mini_engine.gpu.graphs import no_graph
    from mini_engine.layers.fused_layers import fuse
    from tests.l10.gpu_helpers import answers, graph_engine

    model = fuse(load_model(directory))
    engine = graph_engine(model, no_graph, load_kernel(kernel), max_num_seqs=len(prompts))
    return answers(engine, prompts, max_tokens)


FUNCTIONS = {"kernel": kernel, "tokens": tokens}


def main():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    answer_calls(lambda name, *arguments: FUNCTIONS[name](*arguments))


if __name__ == "__main__":
    main()
