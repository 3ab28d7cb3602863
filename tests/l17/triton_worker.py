"""Lesson 17. Runs the Triton kernels over rows in Triton's interpreter, with a window or without."""

import os

from tests.l3.pickled import answer_calls

os.environ["TRITON_INTERPRET"] = "1"


def main() -> None:
    from mini_engine.attention.contract import EVERY_KEY
    from mini_engine.quantized.formats import FORMATS
    from mini_engine.quantized.kernels import load_kernel
    from mini_engine.windows.kernels import windowed

    def attend(rows, q, *rest, window=EVERY_KEY):
        if isinstance(q, int):
            window, q, *rest = q, *rest
        kernel = load_kernel("triton", "cpu", q.dtype, FORMATS[rows])
        return (kernel if window == EVERY_KEY else windowed(kernel, window))(q, *rest)

    answer_calls(attend)


if __name__ == "__main__":
    main()
