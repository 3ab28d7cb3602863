"""Course machinery. The tensors of a page answer as torch does: numbers, shapes, dtypes, and what a view shares.

Protects readers who write tasks in the page from verdicts that torch would not give.
"""

import itertools
import math
import random
from array import array

from scripts.live.small.strided import DTYPES
from scripts.live.small.tensor import OPERATIONS
from scripts.live.small_torch import SMALL, NotInThePage
from scripts.live.without_torch import MODULES, AbsentModule

import pytest
import torch

USES = """
t.tensor([0.1, -2.0, 3.5, 3.4]).argmax()
t.argmax(t.tensor([7.0, 0.0, 7.0]), dim=-1)
t.tensor([1.0, 5.0, 2.0]).max(dim=-1).indices
a.max(dim=1).values, a.max(), a.min(0).indices, a.amax((0, 1)), a.amin(-1, keepdim=True), a.argmin(), a.aminmax(dim=1)
t.tensor([1.0, nan, 2.0]).max(), t.tensor([1.0, nan, 2.0]).argmax(), t.tensor([1.0, nan]).aminmax()
t.tensor([3, 1, 2]).topk(2).indices, a.topk(2, dim=0).values
t.tensor([3, 1, 2]).argsort(descending=True), a.sort(dim=0), a.sort(descending=True).values
t.tensor([2, 1, 2, 1, 0]).sort(stable=True).indices, t.argsort(t.tensor([1.0, nan, 0.0]))
t.tensor([3, -5, 2]).abs().argmin()
t.as_tensor([4, 5, 6]).index_select(0, t.tensor([2])), a.index_select(1, t.tensor([1, 1]))
t.arange(5), t.arange(2, 6)[-1:], t.arange(10, 0, -3), t.arange(0, 1, 0.25), t.arange(t.tensor(3))
t.tensor([5, 6, 7, 8])[t.tensor([1, 3])], t.tensor([5, 6, 7, 8])[t.tensor([True, False, False, True])]
t.tensor([[1, 2], [3, 4]])[1], t.tensor([[1, 2], [3, 4]])[:, 1], t.tensor([[1, 2], [3, 4]])[1, 0]
t.tensor(range(3), dtype=t.long), t.tensor([]), t.tensor([[]]).shape, t.tensor([True, False]), t.tensor([1, True])
t.tensor([t.tensor(1), t.tensor(2)]), t.tensor([[1.0, 2], [3, 4]]), t.tensor(7.5), t.tensor([[1], [2]], dtype=t.float64)
t.ones(4, dtype=t.int64).cumsum(0) - 1, a.cumsum(0), b.cumsum(-1, dtype=t.float64), a.cumprod(1), b.cummax(-1)
t.zeros(2, 3), t.zeros((2, 3)).shape, t.zeros(1, 3).squeeze(0), t.zeros(1, 3, 1).squeeze(), t.empty(0).numel()
a.unsqueeze(1).shape, a.unsqueeze(-1).shape, a[None].shape, a[:, None, ..., None].shape, a[..., 1], a[0, ...]
a.flatten(), c.flatten(0, 1), c.flatten(1), c.unflatten(-1, (3, -1)), c.transpose(0, 2).flatten()
(a != 1).nonzero(), (b > 0).sum(), (b > 0).nonzero(as_tuple=True), t.argwhere(b > 0), t.tensor(3).nonzero()
t.full((1,), 7), t.full((2, 2), 1.5), t.full_like(a, 3), t.zeros_like(b), t.ones_like(a, dtype=t.bool)
a.new_zeros(3), a.new_full((2,), 4.5), a.new_tensor([1]), t.eye(3), t.eye(2, 3)
a + 1, 1 - a, a * 2.5, a / 2, 7 / b, a // 2, a % 2, -b, b**2, 2**a, abs(b), b // 0.7, b % 0.7
t.tensor([5, -5]) // t.tensor([3, 3]), t.tensor([5, -5]) % 3, t.tensor([5.0, -5.0]) % -3
t.tensor([1.0, -1.0, 0.0]) / 0, t.tensor([3, 5]) / t.tensor([2, 0]), t.tensor([1e30]) * 1e30
t.tensor([0.1]) + 0.2, t.tensor([0.1]) * t.tensor([3], dtype=t.float64), t.tensor([16777216.0]) + 1
a & 1, a | 8, a ^ 3, ~a, a << 4, a >> 1, ~(a > 1), (a > 1) & (a < 5), (a > 1) | (a == 0)
a == 3, a != 3, a < 3, a <= t.tensor([1, 2, 3, 4]), b > 0, b >= b, t.eq(a, 1), a.eq(a)
a.maximum(t.tensor(3)), t.minimum(b, -b), b.clamp(-0.5, 0.5), b.clamp_min(0), b.clamp(max=0.1), a.clamp_max(2)
t.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -0.2]).round(), b.floor(), b.ceil(), b.trunc(), a.round()
b.exp(), b.abs().log(), b.abs().sqrt(), b.abs().rsqrt(), b.sin(), b.cos(), b.tanh(), b.sigmoid(), b.square(), b.sign()
t.tensor([-1.0, 0.0]).log(), t.tensor([-1.0, 0.0]).sqrt(), t.tensor([1000.0, -1000.0]).exp(), b.reciprocal()
t.tensor([1.0, nan, inf]).isnan(), t.tensor([1.0, nan, inf]).isfinite(), t.tensor([1.0, nan, -inf]).isinf()
t.tensor([1.0, nan]).nan_to_num(3.0), b.neg(), (b > 0).logical_not(), t.tensor([1.0, nan]).maximum(t.tensor([nan, 1.0]))
t.where(b > 0, b, 0.0), t.where(b > 0, 1, 2), t.where(a > 2, a, t.tensor(1.5)), t.where(b > 0)
b.masked_fill(b > 0, -inf), a.masked_fill(a[:, :1] > 1, 9), b.softmax(-1), b.softmax(0), b.log_softmax(-1)
t.tensor([[-inf, 0.0], [nan, 1.0], [-inf, -inf]]).softmax(-1), b.logsumexp(1), b.double().log_softmax(dim=-1)
a.sum(), a.sum(0), a.sum(dim=(0, 1), keepdim=True), b.mean()
b.mean(-1, keepdim=True), b.norm(), b.norm(dim=-1), a.prod()
(a > 1).all(), (a > 1).all(dim=1), (a > 1).any(0), (a > 9).any(), a.count_nonzero(), t.tensor([]).sum()
t.searchsorted(t.tensor([1, 3, 3, 5]), t.tensor([0, 3, 6])), t.searchsorted(t.tensor([1, 3, 3]), 3, right=True)
t.searchsorted(a.cumsum(1), t.tensor([[4], [9], [1]]), right=True), t.bucketize(t.tensor([2]), t.tensor([1, 3]))
b.gather(1, t.tensor([[0], [2], [1]]))
a.gather(0, t.tensor([[2, 0, 1, 1]])), a.scatter(1, t.tensor([[1], [0], [3]]), 9)
(b > 0).scatter(1, b.argsort(), b > 0), a.index_fill(0, t.tensor([1]), 7), a.index_copy(0, t.tensor([2]), a[:1])
a.index_add(0, t.tensor([1, 1]), a[:2]), t.zeros(3).scatter_add(0, t.tensor([1, 1]), t.ones(2))
t.bincount(t.tensor([1, 3, 1])), t.bincount(t.tensor([1]), minlength=4), t.histc(b, bins=4, min=-1, max=1)
t.tensor([3, 1, 3]).unique(), t.unique(a, return_inverse=True, return_counts=True), t.unique_consecutive(a.flatten())
a.flip(0), c.flip(0, 2), a.roll(1, 0), t.corrcoef(b)
t.cat((a, a)), t.cat((a, b), dim=1), t.cat([t.empty(0), b]), t.stack((a, a), dim=-1), t.stack([a[0], a[1]])
t.hstack((a, a)), t.hstack((a[0], a[1])), t.vstack((a[0], a[1])), t.nn.utils.rnn.pad_sequence([a[0], a[1][:2]], True)
F.kl_div(b.log_softmax(1), b.softmax(1), reduction="none")
F.cross_entropy(b, t.tensor([0, 3, 1])), a.div(3, rounding_mode="floor")
a.split(2), a.split((1, 3), dim=1), a.chunk(2, dim=-1), a.chunk(2), a.unbind(1), t.split(a, 5)
a.repeat(2, 1), a[0].repeat(2, 2), a.repeat_interleave(2, dim=1), t.repeat_interleave(t.tensor([2, 0, 1]))
a.repeat_interleave(t.tensor([1, 2, 0]), dim=0), a.repeat_interleave(2), a.expand(2, 3, 4), a[:, :1].expand(-1, 3)
F.pad(a, (1, 2)), F.pad(a, (0, 0, 1, 0), value=9), F.pad(b, (-1, 1)), F.one_hot(t.tensor([0, 2]), 3)
t.ones(3, 4).tril(), t.ones(3, 4, dtype=t.bool).tril(1), b.triu(-1)
b @ b.T, b[0] @ b[1], b @ b[0], b[0] @ b.T, d @ d.mT, t.matmul(b[None], d.mT), t.outer(b[0], b[1]), t.logaddexp(b, -b)
t.einsum("ij,kj->ik", b, b), t.einsum("bij,bkj->bik", d, d), t.einsum("qhd,khd->qhk", d, d)
t.einsum("hd,kd->hk", b, b), t.einsum("...i,ij->...j", d, b.T), t.kron(a, b)
t.linalg.vector_norm(b, math.inf, dim=1), t.linalg.vector_norm(b)
F.linear(b, b, b[:, 0]), F.rms_norm(b, (4,), b[0], 1e-6), F.softmax(b, dim=-1)
F.scaled_dot_product_attention(d, d, d), F.scaled_dot_product_attention(d, d, d, is_causal=True, scale=0.3)
F.scaled_dot_product_attention(d[None], d[None, :1], d[None, :1], enable_gqa=True, attn_mask=t.ones(3, 3).bool().tril())
F.scaled_dot_product_attention(d, d, d, attn_mask=t.zeros(3, 3).bool())
a.to(t.float32), b.long(), b.int(), t.tensor([300, -1]).to(t.uint8), a.bool(), a.half()
t.tensor([2.7, -2.7]).to(t.int8), t.tensor([1.0001]).bfloat16(), t.tensor([70000.0]).half(), t.tensor([0.1]).half() * 3
t.tensor([1.0]).view(t.int32), t.tensor([1, 256]).view(t.uint8), t.arange(8, dtype=t.uint8).view(t.float16)
t.arange(8, dtype=t.uint8)[4:].view(t.int32)
t.tensor([1.5]).half().view(t.uint8), t.tensor([1.5, 2]).bfloat16().view(t.int16)
t.frombuffer(array("q", [1, 2]), dtype=t.int64), t.frombuffer(array("i", [1, 2, 3, 4]), dtype=t.int32).view(2, 2)
c[:, t.tensor([1, 0])], c[t.tensor([1, 0]), :, t.tensor([2, 0])], c[0, t.tensor([1]), 1:], c[[1, 0]], c[c > 5]
c[t.tensor([[0, 1], [1, 0]])], c[..., 0][t.tensor([1])], c[:, :, ::2], c[1, None], c[t.tensor([-1])], c[a[:2, :2] > 1]
a.permute(1, 0), a.T, c.permute(2, 0, 1), a.narrow(1, 1, 2)
a.select(0, -1), a.t(), c.mT, a.view(2, -1), a.view(-1, 1, 4)
a.T.reshape(2, 6), a.T.is_contiguous()
a[:, 1:].stride(), a[1:].storage_offset(), c.transpose(0, 1).contiguous().stride()
c.view(4, 3)[::2].view(2, 3, 1).stride(), c[:, :1].reshape(-1), a.nbytes, a.element_size(), a.dim(), a.size(1), a.size()
t.equal(a, a.clone()), t.allclose(b, b + 1e-9), t.isclose(b, b * 1.1), t.is_tensor(a), t.is_tensor([1])
int(t.tensor([9])), float(t.tensor(1.5)), bool(t.tensor([0]))
len(a), [int(x) for x in t.tensor([1, 2])], f"{t.tensor(2.0):g}"
t.finfo(t.float32).tiny, t.finfo(t.float16).max, t.iinfo(t.int32).max, t.float32.itemsize, t.tensor([1]).device.type
2 in t.tensor([1, 2]), a.tolist(), t.zeros(2, 0).tolist(), t.zeros(0, 2).tolist(), t.zeros(0, 2).sum(0), a.item
""".strip().splitlines()[:-1]


class Few:
    """`torch`, or a module of it, as a page has it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name):
        inner = f"{self.name}.{name}"
        return Few(inner) if inner in MODULES else SMALL[self.name][name]


def numbers(t):
    """Return tensors to work on: whole numbers, and others of several shapes."""
    chance = random.Random(1)
    return {
        "a": t.tensor([[0, 1, 2, 3], [7, 5, 1, 4], [2, 2, 6, 0]]),
        "b": t.tensor([[chance.uniform(-1, 1) for _ in range(4)] for _ in range(3)]),
        "e": t.arange(9).view(3, 3),
        "c": t.arange(12).view(2, 2, 3),
        "d": t.tensor([[[chance.gauss(0, 1) for _ in range(4)] for _ in range(3)] for _ in range(3)]),
    }


def names(t, functional):
    return numbers(t) | {"t": t, "F": functional, "array": array, "math": math, "nan": math.nan, "inf": math.inf}


FEW, MANY = names(Few("torch"), Few("torch.nn.functional")), names(torch, torch.nn.functional)


def told(result, digits: int = 6):
    """Return a result as plain data: its shape, dtype and numbers, floats to within rounding."""
    if hasattr(result, "tolist"):
        return list(result.shape), str(result.dtype), told(result.tolist(), digits)
    if isinstance(result, (tuple, list)):
        return [told(one, digits) for one in result]
    if isinstance(result, float):
        return float(f"{result:.{digits}g}") + 0.0 if math.isfinite(result) else repr(result)
    return str(result) if type(result).__module__.startswith(("torch", "scripts")) else result


def same(one, other, off=2e-7):
    """Compare plain data; numbers may differ by what torch's order of adding does in float32, or by `off`."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(*pair, off) for pair in zip(one, other, strict=True))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return same(list(one), list(other), off)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=2e-6, abs_tol=off)
    return one == other and type(one) is type(other)


@pytest.mark.parametrize("use", USES)
def test_it_answers_as_torch_does(use):
    few, many = told(eval(use, FEW), 9), told(eval(use, MANY), 9)
    few, many = (x if isinstance(x, list) else [x] for x in (few, many))
    for index, (one, other) in enumerate(zip(few, many, strict=True)):
        assert same(one, other), f"number {index} of: {use}\nhere  {one}\ntorch {other}"


def test_each_operation_is_compared_with_torch_s():
    text = " ".join(USES)
    signs = {"add", "sub", "mul", "div", "pow", "floor_divide", "remainder", "neg", "abs", "matmul", "ne", "lt", "le"}
    signs |= {"gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift"}
    signs |= {"bitwise_right_shift", "mm", "bmm", "mv", "dot", "inner", "empty_like", "new_ones", "new_empty"}
    signs |= {"zero", "fill"}  # in what follows
    left = [name for name in OPERATIONS if name not in signs and f"{name}(" not in text]
    assert not left, f"add uses of {left}"


def test_results_have_torch_s_dtype_and_are_rounded_to_it():
    """Every pair of dtypes, as tensors, as tensors without dimensions, and with Python's numbers."""
    acts = ("x + y", "x * y", "x - 1.3", "x * 2", "x == y", "t.where(x > 1, x, y)", "t.maximum(x, y)", "x + y[0]")
    for one, other in itertools.product(DTYPES, DTYPES):
        for act in acts:
            found = []
            for t in (Few("torch"), torch):
                x, y = (t.tensor([1, 0, 3.3]).to(getattr(t, dtype.name)) for dtype in (one, other))
                try:
                    found.append(told(eval(act, {"t": t, "x": x, "y": y}), 9))
                except (RuntimeError, TypeError) as error:
                    found.append(type(error).__name__)
            if found[1] not in ("RuntimeError", "TypeError"):  # torch refuses what nobody asks a page for
                assert found[0] == found[1], f"{act} of {one} and {other}"


def test_float32_is_rounded_as_torch_rounds():
    chance = random.Random(2)
    x, y = ([chance.uniform(-9, 9) for _ in range(500)] for _ in range(2))
    for act in ("x + y", "x * y", "x / y", "x - y", "x * 0.1", "x.half() * y.half()", "x.bfloat16()"):
        few, many = (eval(act, {"x": t.tensor(x), "y": t.tensor(y)}) for t in (Few("torch"), torch))
        assert few.tolist() == many.tolist(), f"{act}: a bit differs"


WRITES = """
x[1] = 5
x[1:3] = torch.tensor([7, 8, 9, 10])
x[[0, 2]] = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
x[torch.tensor([1, 1]), torch.tensor([0, 3])] = torch.tensor([8, 9])
x[x > 3] = -1
x.view(-1)[5] = 100
x.flatten(0, 1)[torch.tensor([0, 11])] = torch.tensor([50, 60])
x.T[2] = torch.arange(3)
x[:, 1].fill_(3)
x[1:].zero_()
x[0].copy_(x[1])
x += 1
x[1] *= 2
x[torch.tensor([0, 2])] += 1
x[:, ::2] -= torch.tensor([[1], [2], [3]])
x.masked_fill_(x > 2, 0)
x.clamp_(1, 3)
x.add_(5)
x.view(torch.int32)[0, 0] = 7
x.index_copy_(0, torch.tensor([2]), x[:1] + 1)
x[[2, 1]] = x[[1, 2]]
x.unsqueeze(0).expand(1, 3, 4)[0, 2] = 4
x.split(1)[1][0, 1] = 33
x.select(1, 2).mul_(3)
x[None, 1, None] = torch.ones(4)
x[1, 2] = 2.9
x.index_put_((torch.LongTensor([0, 2]), torch.tensor(1)), torch.tensor([8, 9]))
x.T.copy_(x.T.clone() + 1)
""".strip().splitlines()


@pytest.mark.parametrize("write", WRITES)
def test_writing_reaches_what_a_view_shows(write):
    found = []
    for t in (Few("torch"), torch):
        x = numbers(t)["a"]
        watching = x[1]
        exec(write, {"x": x, "torch": t})
        found.append((told(x), told(watching)))
    assert found[0] == found[1], write


@pytest.mark.parametrize(
    "wrong",
    [
        "a[3]", "a[:, t.tensor([4])]", "a[0, 0, 0]", "a.view(5)", "a.T.view(12)", "a + t.ones(5)", "a @ a", "b[b]",
        "a.expand(2, 4)", "t.cat((a, c))", "bool(a)", "b.item()", "t.tensor([[1], [1, 2]])", "b.split((1, 1))", "a % 0",
        "len(t.tensor(1))", "e.copy_(e.T)", "e[0, 1:].copy_(e[0, :-1])", "a.topk(9)", "a.__iadd__(0.5)",
    ],
)  # fmt: skip
def test_what_torch_refuses_is_refused(wrong):
    with pytest.raises(Exception) as many:
        eval(wrong, names(torch, torch.nn.functional))
    with pytest.raises(type(many.value)) as few:
        eval(wrong, names(Few("torch"), None))
    assert not isinstance(few.value, NotInThePage), "this is the reader's mistake"


def test_random_rows_have_torch_s_best():
    chance = random.Random(0)
    few, many = Few("torch"), torch
    for _ in range(200):
        row = [chance.choice([-1.0, 0.5, 2.0, 3.5]) for _ in range(chance.randint(1, 8))]
        for act in ("argmax", "sort", "cumsum"):
            one, other = (getattr(t.tensor(row), act)(*[0] * (act == "cumsum")) for t in (few, many))
            one, other = (x.values if act == "sort" else x for x in (one, other))
            assert told(one) == told(other), (act, row)


@pytest.mark.parametrize("use", ["a.svd()", "a.sum(axis=0)", "F.pad(a, (1, 1), 'circular')", "absent.fft(a)"])
def test_what_it_does_not_have_says_so(use):
    with pytest.raises(NotInThePage, match="run this check in a terminal"):
        eval(use, FEW | {"absent": AbsentModule("torch")})


def test_random_numbers_are_torch_s():
    found = []
    for t in (Few("torch"), torch):
        generator = t.Generator().manual_seed(3)
        rows = [t.randn(size, generator=generator) for size in (1, 2, 15, 16, 17, 100)]
        rows += [t.randn(5, 7, generator=generator, dtype=t.float64), t.rand(9, generator=generator)]
        rows += [t.randint(7, (9,), generator=generator), t.randperm(11, generator=generator)]
        t.manual_seed(2**40 + 5)
        rows += [t.rand(3, dtype=t.float64), t.randn(3), t.randint(3, 9, (2, 2))]
        found.append([told(row) for row in rows])
    for few, many in zip(*found, strict=True):
        assert same(few, many, 2e-6)


PRINTED = (
    "a",
    "b",
    "b * 1e6",
    "b.double()",
    "c",
    "t.tensor(3)",
    "t.tensor([])",
    "t.tensor([1.0, 2])",
    "a > 2",
    "a[0].int()",
)


@pytest.mark.parametrize("use", [*PRINTED, "t.tensor([1.0, nan, -inf])", "t.tensor([0.5, nan])", "t.tensor(0.25)"])
def test_a_verdict_shows_it_as_torch_prints_it(use):
    few, many = (" ".join(repr(eval(use, at)).split()) for at in (FEW, MANY))
    assert few == many


def test_a_copy_is_the_reader_s_own():
    one = SMALL["torch"]["tensor"]([1, 2])
    copies = [one.clone(), SMALL["torch"]["tensor"](one), one[[0, 1]], one.to(SMALL["torch"]["float32"]), one + 0]
    one[0] = 9
    assert all(int(copy[0]) == 1 for copy in copies)
