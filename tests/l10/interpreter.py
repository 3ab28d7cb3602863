"""Lesson 10. Runs the layers' kernels in Triton's interpreter, which must be chosen before Triton is imported."""

import os

from tests.shared.pickled import answer_calls


def kernel(name, *inputs):
    """Run a kernel; return its result and its inputs afterwards."""
    import torch

    from mini_engine.layers import layer_kernels

    with torch.inference_mode():
        result = getattr(layer_kernels, name)(*inputs)
    return result, inputs


def main():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    answer_calls(kernel)


if __name__ == "__main__":
    main()
