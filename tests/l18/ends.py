"""Lesson 18. What ranks do where a test wants a fault: run in their processes, so each must be found by its name."""

import time
from pathlib import Path
from typing import NamedTuple

from mini_engine.families.qwen3 import DENSE

FOREVER = 600.0


def read_forever(path: Path):
    """A checkpoint on a disk that does not answer."""
    time.sleep(FOREVER)


def read_wrongly(path: Path):
    """A checkpoint that is damaged."""
    raise ValueError("the disk is on fire")


class Fail(NamedTuple):
    """A message that a rank cannot carry out."""

    def carry_out(self, memory) -> None:
        raise ValueError("no such block")


class SlowlyStored:
    """A checkpoint of many tensors, each of which takes rank 0 a while to read."""

    def __init__(self, path: Path, fails: bool = False) -> None:
        self.config, self.fails = DENSE.stored(path).config, fails

    def load(self, dtype, device, cut):
        for _ in range(int(FOREVER / 0.1)):
            cut.part_of("model.norm.weight", (1,), self.config)
            time.sleep(0.1)
            if self.fails:
                raise ValueError("the disk is on fire")
