"""Lesson 6. Gives back the threads that parallel loops leave behind."""

import ctypes
from contextlib import suppress
from pathlib import Path

import torch

SOFT = 1  # omp_pause_soft: the next parallel loop starts the threads again


def release_threads() -> None:
    """End the idle threads that the calling thread's parallel loops have left behind.

    GNU's OpenMP keeps a team for each thread that has run such a loop. While all teams together have more threads than
    there are cores, threads that wait for their team do not spin but sleep, and the team of a decode step waits at
    several points of every layer. Does nothing if torch brings another OpenMP.
    """
    for library in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(str(library)).omp_pause_resource_all(SOFT)
