"""Lesson 15. Runs windowed Triton kernels in Triton's interpreter. The argument is the module that loads the kernel."""

import importlib
import os
import sys

from tests.l3.pickled import answer_calls

os.environ["TRITON_INTERPRET"] = "1"


def main(registry: str) -> None:
    from mini_engine.windows.kernels import windowed

    load_kernel = importlib.import_module(registry).load_kernel
    answer_calls(lambda w, *inputs: windowed(load_kernel("triton", "cpu", inputs[0].dtype), w)(*inputs))


if __name__ == "__main__":
    main(sys.argv[1])
