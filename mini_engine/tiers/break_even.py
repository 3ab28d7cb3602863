"""Lesson 12. Chooses between computing tokens again and bringing their KV back from a tier, by measurements.

    again:  n / rate            back:  latency + n · bytes per token / bandwidth

Bringing back wins from n* tokens on. With a bandwidth below `bytes per token · rate` it never does.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from mini_engine.kv.block_table import NULL_BLOCK
from mini_engine.tiers.files import create
from mini_engine.tiers.store import Blocks

PROBE_ROUNDS = 5


@dataclass(frozen=True)
class BreakEven:
    """One tier against computing again.

    prefill_rate: tokens computed per second. bytes_per_token: of KV, all layers.
    bandwidth: bytes per second that the tier gives back. latency: seconds before the first of them.
    """

    prefill_rate: float
    bytes_per_token: int
    bandwidth: float
    latency: float = 0.0

    @property
    def num_tokens(self) -> float:
        """The number of tokens n* for which both take the same time, 0 without latency; infinite if they never do."""
        gain = 1 / self.prefill_rate - self.bytes_per_token / self.bandwidth  # seconds a token
        return self.latency / gain if gain > 0 else math.inf


class Speed(NamedTuple):
    """The speed of a tier's reads: bytes per second, and the seconds before the first of them."""

    bandwidth: float
    latency: float


def measured_rate(prefill: Callable[[int], None], num_tokens: int = 64) -> float:
    """Return how many tokens a second `prefill(num_tokens)` computes, the median of several calls after a first one."""
    prefill(num_tokens)
    return num_tokens / median(seconds(lambda: prefill(num_tokens)) for _ in range(PROBE_ROUNDS))


def measured_copy(blocks: Blocks) -> Speed:
    """Copy a payload of zeros into the null block, which holds nothing."""
    payload = bytes(blocks.payload_bytes)
    taken = median(seconds(lambda: blocks.write([NULL_BLOCK], [payload])) for _ in range(PROBE_ROUNDS))
    return Speed(blocks.payload_bytes / max(taken, 1e-9), 0.0)


def measured_disk(directory: Path, num_bytes: int) -> Speed:
    """Write a probe of `num_bytes`, at least 1 MiB, read it back cold where the system allows, and remove it.

    Raises:
        OSError: the directory cannot be written.
    """
    probe, num_bytes = directory / f"probe-{os.getpid()}.tmp", max(num_bytes, 2**20)
    try:
        with create(probe) as file:
            file.write(bytes(num_bytes))
            file.flush()
            whole = median(seconds(lambda: read_cold(probe, num_bytes)) for _ in range(PROBE_ROUNDS))
            first = median(seconds(lambda: read_cold(probe, 1)) for _ in range(PROBE_ROUNDS))
    finally:
        probe.unlink(missing_ok=True)
    return Speed(num_bytes / max(whole - first, 1e-9), first)


def read_cold(path: Path, num_bytes: int) -> bytes:
    """Read a file's first bytes, after asking the system to forget its pages. Other systems may answer from memory."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read(num_bytes)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
