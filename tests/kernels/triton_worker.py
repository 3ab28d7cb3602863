"""Course machinery. Runs the Triton kernels in Triton's interpreter, which must be chosen before Triton is imported."""

import os

from tests.shared.pickled import answer_calls

os.environ["TRITON_INTERPRET"] = "1"


def main() -> None:
    from mini_engine.attention.registry import load_kernel

    answer_calls(lambda wanted, *inputs: load_kernel(*wanted)(*inputs))


if __name__ == "__main__":
    main()
