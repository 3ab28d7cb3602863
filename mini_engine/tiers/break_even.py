"""Lesson 12. What pays: computing tokens again, or bringing their KV back from a tier. Measured, not hoped for.

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
        """The number of tokens from which the tier is faster; infinite if it never is."""
        gain = 1 / self.prefill_rate - self.bytes_per_token / self.bandwidth  # seconds a token
        return self.latency / gain if gain > 0 else math.inf

    def pays(self, num_tokens: int) -> bool:
        """Whether bringing back this many tokens takes less time than computing them."""
        return num_tokens > 0 and num_tokens >= self.num_tokens


def measured_rate(prefill: Callable[[int], None], num_tokens: int = 64) -> float:
    """Return how many tokens a second `prefill(num_tokens)` computes, the median of several calls after a first one."""
    prefill(num_tokens)
    return num_tokens / median(seconds(lambda: prefill(num_tokens)) for _ in range(PROBE_ROUNDS))


def measured_bandwidth(directory: Path, num_bytes: int) -> tuple[float, float]:
    """Write a probe of `num_bytes` to `directory`, read it back cold where the system allows, and remove it.

    Returns:
        bytes per second, and the seconds that opening and reading the first byte take.

    Raises:
        OSError: the directory cannot be written.
    """
    probe = directory / "probe.tmp"
    try:
        probe.write_bytes(bytes(num_bytes))
        whole = median(seconds(lambda: read_cold(probe, num_bytes)) for _ in range(PROBE_ROUNDS))
        first = median(seconds(lambda: read_cold(probe, 1)) for _ in range(PROBE_ROUNDS))
    finally:
        probe.unlink(missing_ok=True)
    return num_bytes / max(whole - first, 1e-9), first


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
