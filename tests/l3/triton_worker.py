"""Lesson 3. Runs a Triton kernel in Triton's interpreter. The argument is the module whose `load_kernel` knows it."""

import importlib
import os
import sys

from tests.l3.pickled import answer_calls

os.environ["TRITON_INTERPRET"] = "1"


def main(registry: str) -> None:
    load_kernel = importlib.import_module(registry).load_kernel
    answer_calls(lambda *inputs: load_kernel("triton", "cpu", inputs[0].dtype)(*inputs))


if __name__ == "__main__":
    main(sys.argv[1])
