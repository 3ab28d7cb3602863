"""Course machinery. Operations of small tensors on one number at a time: arithmetic, comparison, choice, rounding.

Each result is computed in float64 and rounded once, to the dtype that torch gives it.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from scripts.live.small.strided import BOOL, FLOAT, Dtype, bool_, float32, int64, missing, together, wider
from scripts.live.small.tensor import OPERATIONS, Tensor, operation

KINDS = {bool: bool_, int: int64, float: float32}


def common(*operands: Any) -> Dtype:
    """Return the dtype of a result: of the tensors, unless one without dimensions or a number is of a higher kind."""
    groups: list[Dtype | None] = [None, None, None]  # tensors with dimensions, without, numbers
    for one in operands:
        group = (0 if one.shape else 1) if isinstance(one, Tensor) else 2
        dtype = one.dtype if isinstance(one, Tensor) else KINDS[type(one)]
        before = groups[group]
        groups[group] = dtype if before is None else wider(before, dtype)
    best: Dtype | None = None
    for dtype in groups:
        if dtype and (best is None or dtype.kind > best.kind):
            best = dtype
    assert best is not None
    return best


def aligned(operands: Sequence[Any], dtype: Dtype | None) -> tuple[list[list[Any]], Any, Any]:
    """Return the operands' numbers in `dtype`, their common shape, and a tensor to make the result with."""
    tensors = [one for one in operands if isinstance(one, Tensor)]
    like = next((one for one in tensors if one.shape), tensors[0])
    shape = together(*(one.shape for one in tensors))
    columns = []
    for one in operands:
        if not isinstance(one, Tensor):
            one = like.made([one], (), dtype or KINDS[type(one)])
        columns.append((one.to(dtype) if dtype else one).expand(shape).values)
    return columns, shape, like


def both(act: Callable[[Any, Any], Any], one: Any, other: Any, dtype: Dtype | None = None, kind: int = BOOL) -> Tensor:
    """Combine two operands. dtype: of the result, if it is not the operands'. kind: of the operands, at least."""
    work = common(one, other)
    if work.kind < kind:
        work = float32 if kind == FLOAT else int64
    (a, b), shape, like = aligned((one, other), work)
    return like.made(list(map(act, a, b)), shape, dtype or work)


def divided(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if not a or a != a else math.copysign(math.inf, a) * math.copysign(1, b)


def safely(act: Callable[..., Any], otherwise: Callable[..., float] = lambda *_: math.nan) -> Callable[..., Any]:
    """Return `act`, with a float where Python raises an error."""

    def tried(*numbers: Any) -> Any:
        try:
            return act(*numbers)
        except (ValueError, OverflowError, ZeroDivisionError):
            return otherwise(*numbers)

    return tried


def by_whole(act: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a division of which the one of a whole number by zero is torch's error."""

    def tried(a: Any, b: Any) -> Any:
        if not b and isinstance(b, int):
            raise RuntimeError("ZeroDivisionError")
        return act(a, b) if b else math.nan

    return tried


def log_of_sum(a: float, b: float) -> float:
    """Return log(exp(a) + exp(b))."""
    return a if a == b == -math.inf else max(a, b) + math.log1p(math.exp(-abs(a - b)))


def least(a: Any, b: Any) -> Any:
    return a if a != a or a < b else b


def most(a: Any, b: Any) -> Any:
    return a if a != a or a > b else b


# ---- two operands ----

ARITHMETIC: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "add": (operator.add, BOOL), "sub": (operator.sub, BOOL), "mul": (operator.mul, BOOL), "div": (divided, FLOAT),
    "floor_divide": (by_whole(operator.floordiv), BOOL), "remainder": (by_whole(operator.mod), BOOL),
    "pow": (safely(operator.pow, lambda a, b: math.inf), BOOL),
    "maximum": (lambda a, b: b if b != b else most(a, b), BOOL),
    "minimum": (lambda a, b: b if b != b else least(a, b), BOOL),
    "logaddexp": (safely(log_of_sum), FLOAT),
    "bitwise_and": (operator.and_, BOOL), "bitwise_or": (operator.or_, BOOL), "bitwise_xor": (operator.xor, BOOL),
    "bitwise_left_shift": (operator.lshift, BOOL), "bitwise_right_shift": (operator.rshift, BOOL),
}  # fmt: skip


COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
SIGNS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip


def arithmetic(name: str) -> Callable[..., Tensor]:
    act, kind = ARITHMETIC[name]
    return lambda one, other: both(act, one, other, kind=kind)


def comparison(name: str) -> Callable[..., Any]:
    def compare(one: Any, other: Any) -> Any:
        return both(COMPARISONS[name], one, other, bool_) if isinstance(other, (Tensor, *KINDS)) else NotImplemented

    return compare


def in_place(act: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an operation that writes its result into its first operand."""

    def change(one: Tensor, *others: Any, **more: Any) -> Tensor:
        found = act(one, *others, **more)
        if found.dtype.kind > one.dtype.kind:
            raise RuntimeError(f"result type {found.dtype} can't be cast to the desired output type {one.dtype}")
        if found.shape != one.shape:
            raise RuntimeError(f"output with shape {list(one.shape)} doesn't match {list(found.shape)}")
        return one.copy_(found)

    return change


def reflected(act: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda one, other: act(other, one)


for name in ARITHMETIC:
    OPERATIONS[name] = arithmetic(name)
    setattr(Tensor, f"{name}_", in_place(OPERATIONS[name]))
for name in COMPARISONS:
    OPERATIONS[name] = comparison(name)
    setattr(Tensor, f"__{name}__", OPERATIONS[name])
for sign, name in SIGNS.items():
    setattr(Tensor, f"__{sign}__", OPERATIONS[name])
    setattr(Tensor, f"__r{sign}__", reflected(OPERATIONS[name]))
    setattr(Tensor, f"__i{sign}__", in_place(OPERATIONS[name]))

# ---- one operand ----


def each(one: Tensor, act: Callable[[Any], Any], dtype: Dtype | None = None, kind: int = BOOL) -> Tensor:
    """Map every number. kind: of the numbers, at least."""
    work = one.dtype if one.dtype.kind >= kind else float32
    return one.made(list(map(act, one.to(work).values)), one.shape, dtype or work)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "exp": safely(math.exp, lambda x: math.inf), "sqrt": safely(math.sqrt), "sin": math.sin, "cos": math.cos,
    "log": lambda x: math.log(x) if x > 0 else -math.inf if x == 0 else math.nan, "tanh": math.tanh,
    "rsqrt": lambda x: 1 / math.sqrt(x) if x > 0 else math.inf if x == 0 else math.nan,
    "sigmoid": safely(lambda x: 1 / (1 + math.exp(-x)), lambda x: 0.0),
}  # fmt: skip
SAME = {"abs": abs, "neg": operator.neg, "square": lambda x: x * x, "sign": lambda x: (x > 0) - (x < 0)}
ROUNDING = {"round": round, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc}
TESTS = {"isnan": lambda x: x != x, "isfinite": math.isfinite, "isinf": math.isinf}


def of_each(act: Callable[[Any], Any], dtype: Dtype | None = None, kind: int = BOOL) -> Callable[[Tensor], Tensor]:
    return lambda one: each(one, act, dtype, kind)


def rounding(act: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    """Whole numbers, and what cannot be rounded, stay as they are."""
    return of_each(lambda x: math.copysign(act(x), x) if isinstance(x, float) and math.isfinite(x) else x)


OPERATIONS |= {name: of_each(act, kind=FLOAT) for name, act in FUNCTIONS.items()}
OPERATIONS |= {name: of_each(act) for name, act in SAME.items()}
OPERATIONS |= {name: rounding(act) for name, act in ROUNDING.items()}
OPERATIONS |= {name: of_each(act, bool_) for name, act in TESTS.items()}
OPERATIONS["logical_not"] = of_each(operator.not_, bool_)
Tensor.__neg__ = OPERATIONS["neg"]  # type: ignore[attr-defined]
Tensor.__abs__ = OPERATIONS["abs"]  # type: ignore[attr-defined]


@operation
def div(one: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode == "trunc":
        raise missing("a division that cuts off")
    return OPERATIONS["floor_divide"](one, other) if rounding_mode else both(divided, one, other, kind=FLOAT)


@operation
def bitwise_not(one: Tensor) -> Tensor:
    return each(one, operator.not_ if one.dtype is bool_ else operator.invert)


Tensor.__invert__ = bitwise_not  # type: ignore[attr-defined]


@operation
def reciprocal(one: Tensor) -> Tensor:
    return OPERATIONS["div"](1.0, one)


@operation
def clamp(one: Tensor, min: Any = None, max: Any = None) -> Tensor:
    found = one if min is None else OPERATIONS["maximum"](one, min)
    return found if max is None else OPERATIONS["minimum"](found, max)


@operation
def clamp_min(one: Tensor, min: Any) -> Tensor:
    return clamp(one, min)


@operation
def clamp_max(one: Tensor, max: Any) -> Tensor:
    return clamp(one, max=max)


@operation
def nan_to_num(one: Tensor, nan: float = 0.0) -> Tensor:
    return each(one, lambda x: nan if x != x else x)


# ---- choosing ----


@operation
def where(condition: Tensor, one: Any = None, other: Any = None) -> Any:
    if one is None:
        return tuple(condition.nonzero().T)
    dtype = common(one, other)
    given = [x if isinstance(x, Tensor) else condition.made([x], (), dtype) for x in (one, other)]
    shape = together(condition.shape, *(x.shape for x in given))
    a, b = (x.to(dtype).expand(shape).values for x in given)
    chosen = [x if is_so else y for is_so, x, y in zip(condition.expand(shape).values, a, b, strict=True)]
    return condition.made(chosen, shape, dtype)


@operation
def masked_fill(one: Tensor, mask: Tensor, value: Any) -> Tensor:
    shape = together(one.shape, mask.shape)
    value = value.item() if isinstance(value, Tensor) else value
    numbers = [
        value if is_so else x for is_so, x in zip(mask.expand(shape).values, one.expand(shape).values, strict=True)
    ]
    return one.made(numbers, shape)


@operation
def fill(one: Tensor, value: Any) -> Tensor:
    return one.made([value.item() if isinstance(value, Tensor) else value] * one.numel(), one.shape)


@operation
def zero(one: Tensor) -> Tensor:
    return fill(one, 0)


@operation
def isclose(one: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    def near(a: Any, b: Any) -> bool:
        return a == b or abs(a - b) <= atol + rtol * abs(b) < math.inf or (equal_nan and a != a and b != b)

    return both(near, one, other, bool_)


@operation
def allclose(one: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    return all(isclose(one, other, rtol, atol, equal_nan).values)


@operation
def equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.values == other.values
