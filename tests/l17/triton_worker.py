"""Lesson 17. Runs the Triton kernels over rows in Triton's interpreter, with a window or without."""

import os

from tests.l3.pickled import answer_calls

os.environ["TRITON_INTERPRET"] = "1"


def main() -> None:
    from mini_engine.attention.contract import EVERY_KEY
    from mini_engine.attention.registry import load_kernel

    def attend(rows, q, *rest, window=EVERY_KEY):
        if isinstance(q, int):
            window, q, *rest = q, *rest
        return load_kernel("triton", "cpu", q.dtype, rows, window)(q, *rest)

    answer_calls(attend)


if __name__ == "__main__":
    main()
