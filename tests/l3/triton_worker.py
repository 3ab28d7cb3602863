"""Lesson 3. Runs the Triton kernel in Triton's interpreter, which must be chosen before Triton is first imported.

Reads pickled inputs from stdin, one call after another, and writes each result to stdout.
"""

import os
import pickle
import sys

os.environ["TRITON_INTERPRET"] = "1"

from mini_engine.attention.registry import load_kernel


def main() -> None:
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
    main()
