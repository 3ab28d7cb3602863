"""Lesson 3. Calls into another process: Triton's interpreter must be chosen before Triton is first imported."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Worker:
    """A process that runs a module whose `main` ends in `answer_calls`."""

    def __init__(self, module, *arguments):
        command = [sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, *inputs):
        """Return what the process answers, or raise what it raised."""
        pickle.dump(inputs, self.process.stdin)
        self.process.stdin.flush()
        answer = pickle.load(self.process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def answer_calls(function: Callable[..., Any]) -> None:
    """Call `function` with each tuple that arrives on stdin, until there are no more."""
    while True:
        try:
            inputs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = function(*inputs)
        except Exception as error:
            answer = error
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.flush()
