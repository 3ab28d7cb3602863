"""Lesson 3. Runs a Triton kernel in Triton's interpreter, which must be chosen before Triton is first imported.

Reads pickled inputs from stdin, one call after another, and writes each result to stdout. The argument is the module
whose `load_kernel` knows the kernel.
"""

import importlib
import os
import pickle
import sys

os.environ["TRITON_INTERPRET"] = "1"


def main(registry: str) -> None:
    load_kernel = importlib.import_module(registry).load_kernel
    while True:
        try:
            inputs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = load_kernel("triton", "cpu", inputs[0].dtype)(*inputs)
        except Exception as error:
            answer = error
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
