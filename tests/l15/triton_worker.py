"""Lesson 15. Runs windowed Triton kernels in Triton's interpreter."""

import os

from tests.l3.pickled import answer_calls

os.environ["TRITON_INTERPRET"] = "1"


def main() -> None:
    from mini_engine.attention.registry import load_kernel

    answer_calls(lambda w, *inputs: load_kernel("triton", "cpu", inputs[0].dtype, window=w)(*inputs))


if __name__ == "__main__":
    main()
