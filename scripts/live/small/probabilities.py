"""Course machinery. Probabilities of small tensors: softmax, logarithms, and what losses make of them."""

import math

from scripts.live.small.along import Dims, along, mean, reduced, sum_
from scripts.live.small.by_index import gather
from scripts.live.small.strided import FLOAT, Dtype, float32, missing
from scripts.live.small.tensor import OPERATIONS, Tensor, operation


@operation
def softmax(one: Tensor, dim: int, dtype: Dtype | None = None) -> Tensor:
    given = one.to(dtype or (one.dtype if one.dtype.kind == FLOAT else float32))
    return along(given, dim, shares).contiguous()


def shares(row: list[float]) -> list[float]:
    """Return exp(x) of a row as shares of their sum."""
    best = max(row, default=0.0)
    if best != best or math.isinf(best) or any(x != x for x in row):
        return [math.nan] * len(row)
    powers = [math.exp(x - best) for x in row]
    whole = math.fsum(powers)
    return [power / whole for power in powers]


@operation
def log_softmax(one: Tensor, dim: int, dtype: Dtype | None = None) -> Tensor:
    given = one.to(dtype or one.dtype)
    return along(given, dim, log_shares).contiguous()


def log_shares(row: list[float]) -> list[float]:
    best = max(row, default=0.0)
    if best != best or math.isinf(best) or any(x != x for x in row):
        return [math.nan] * len(row)
    log = best + math.log(math.fsum(math.exp(x - best) for x in row))
    return [x - log for x in row]


@operation
def logsumexp(one: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    def of(row: list[float]) -> float:
        best = max(row, default=-math.inf)
        return best if not math.isfinite(best) else best + math.log(math.fsum(math.exp(x - best) for x in row))

    return reduced(one, of, dim, keepdim)


def kl_div(one: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """Return target · (log target − one), number by number or summed."""
    logs = target if log_target else OPERATIONS["log"](target)
    shares = OPERATIONS["exp"](target) if log_target else target
    found = OPERATIONS["where"](shares > 0, shares * (logs - one), 0.0)
    if reduction not in ("none", "sum"):
        raise missing(f"kl_div with reduction {reduction!r}")
    return found if reduction == "none" else sum_(found)


def cross_entropy(one: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Return −log of the softmax at each row's target."""
    found = -gather(log_softmax(one, -1), -1, target[..., None])[..., 0]
    return {"none": found.clone, "sum": lambda: sum_(found), "mean": lambda: mean(found)}[reduction]()
