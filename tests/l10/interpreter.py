"""Lesson 10. Calls functions where Triton interprets its kernels, which must be chosen before Triton is imported.

As a program: reads pickled (function, arguments) from stdin, names among `FUNCTIONS`, and writes each result, or the
error, to stdout.
"""

import os
import pickle
import subprocess
import sys

from scripts import ROOT


class Interpreter:
    """A process with TRITON_INTERPRET=1."""

    def __init__(self):
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", "tests.l10.interpreter"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __call__(self, function, *arguments):
        pickle.dump((function, arguments), self.process.stdin)
        self.process.stdin.flush()
        answer = pickle.load(self.process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def kernel(name, *inputs):
    """Run a kernel; return its result and its inputs afterwards."""
    import torch

    from mini_engine.gpu import layer_kernels

    with torch.inference_mode():
        result = getattr(layer_kernels, name)(*inputs)
    return result, inputs


def tokens(directory, prompts, max_tokens, kernel):
    """Return the greedy answers of an engine with fused layers, its decode steps padded to a capture size."""
    from mini_engine.attention.registry import load_kernel
    from mini_engine.gpu.fused_layers import fuse
    from mini_engine.gpu.graphs import no_graph
    from mini_engine.weights import load_model
    from tests.l10.gpu_helpers import answers, graph_engine

    model = fuse(load_model(directory))
    engine = graph_engine(model, no_graph, load_kernel(kernel), max_num_seqs=len(prompts))
    return answers(engine, prompts, max_tokens)


FUNCTIONS = {"kernel": kernel, "tokens": tokens}


def main():
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = FUNCTIONS[function](*arguments)
        except Exception as error:
            answer = error
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
