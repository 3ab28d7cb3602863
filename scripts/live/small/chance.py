"""Course machinery. Random numbers of small tensors: for the same seed torch's own."""

import math
import random
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from scripts.live.small.strided import Dtype, Size, float32, float64, int64, missing, packed, sizes_of
from scripts.live.small.tensor import CPU, Device, Tensor

DEFAULT_SEED = 67280421310721  # torch's
RUN = 16  # numbers that torch makes normal together


class Generator:
    """The Mersenne Twister, seeded as torch seeds it."""

    def __init__(self, device: Any = CPU) -> None:
        self.manual_seed(DEFAULT_SEED)

    def manual_seed(self, seed: int) -> "Generator":
        words = accumulate(range(1, 624), lambda x, i: (1812433253 * (x ^ x >> 30) + i) % 2**32, initial=seed % 2**32)
        self.twister, self.spare = random.Random(), None
        self.twister.setstate((3, (*words, 624), None))
        return self

    def bits(self) -> int:
        return self.twister.getrandbits(32)

    def single(self) -> float:
        return self.bits() % 2**24 / 2**24

    def double(self) -> float:
        high = self.bits()
        return (high << 32 | self.bits()) % 2**53 / 2**53

    def normal(self) -> float:
        """Return one normal number, as torch makes them for small tensors: two at a time."""
        if self.spare is not None:
            found, self.spare = self.spare, None
            return found
        angle, length = 2 * math.pi * self.double(), math.sqrt(-2 * math.log1p(-self.double()))
        self.spare = length * math.sin(angle)
        return length * math.cos(angle)

    def normal_run(self, uniform: Callable[[], float]) -> list[float]:
        return made_normal([uniform() for _ in range(RUN)])

    def normals(self, count: int, uniform: Callable[[], float]) -> list[float]:
        if count < RUN:
            return [self.normal() for _ in range(count)]
        flat = [uniform() for _ in range(count)]
        for start in range(0, count - RUN + 1, RUN):
            flat[start : start + RUN] = made_normal(flat[start : start + RUN])
        if count % RUN:
            flat[-RUN:] = self.normal_run(uniform)
        return flat


def made_normal(uniforms: list[float]) -> list[float]:
    """Return 16 normal numbers for 16 uniform ones (Box and Muller 1958)."""
    lengths = [math.sqrt(-2 * math.log(1 - x)) for x in uniforms[: RUN // 2]]
    angles = [2 * math.pi * x for x in uniforms[RUN // 2 :]]
    return [
        length * turn(angle) for turn in (math.cos, math.sin) for length, angle in zip(lengths, angles, strict=True)
    ]


COMMON = Generator()


def drawn(draw: Callable[[Generator, int, bool], list[float]]) -> Callable[..., Tensor]:
    """Return a function that makes tensors of the numbers drawn, given how many, and whether in float64."""

    def make(*shape: Any, generator: Any = None, dtype: Dtype | None = None, device: Any = CPU) -> Tensor:
        kind, sizes = dtype or float32, Size(sizes_of(shape))
        if kind not in (float32, float64):
            raise missing(f"random {kind}")
        numbers = draw(generator or COMMON, sizes.numel(), kind is float64)
        return Tensor(packed(numbers, kind), kind, sizes, device=Device(device))

    return make


def uniform_of(generator: Generator, is_double: bool) -> Callable[[], float]:
    return generator.double if is_double else generator.single


randn = drawn(lambda generator, count, wide: generator.normals(count, uniform_of(generator, wide)))
rand = drawn(lambda generator, count, wide: [uniform_of(generator, wide)() for _ in range(count)])


def randint(*bounds: Any, generator: Any = None, dtype: Dtype | None = None, size: Any = None) -> Tensor:
    *ends, shape = bounds if size is None else (*bounds, size)
    low, high = (0, *ends) if len(ends) == 1 else ends
    numbers = [(generator or COMMON).bits() % (high - low) + low for _ in range(Size(shape).numel())]
    return Tensor(packed(numbers, dtype or int64), dtype or int64, shape)


def randperm(n: int, generator: Any = None) -> Tensor:
    order = list(range(n))
    for i in range(n - 1):
        other = i + (generator or COMMON).bits() % (n - i)
        order[i], order[other] = order[other], order[i]
    return Tensor(packed(order, int64), int64, (n,))


def manual_seed(seed: int) -> Generator:
    return COMMON.manual_seed(seed)
