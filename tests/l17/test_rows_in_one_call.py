"""Lesson 17. Rows inside lesson 9's one call: C++ writes the rows that Python writes, and a step's result stays."""

from ctypes import CFUNCTYPE, c_int64, c_void_p
from dataclasses import replace

import pytest
import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.kv.allocator import BlockAllocator
from mini_engine.kv.block_table import BlockTable
from mini_engine.kv.block_tensor import KvShape, PackedRequest, plan_packed, reserve_all
from mini_engine.layers import speed_up
from mini_engine.quantized import cpu
from mini_engine.quantized.formats import FORMATS
from mini_engine.quantized.pool import RowKvPool
from tests.shared.compiled import needs_compiler
from tests.support import random_model, refused, some, some_ids

pytestmark = [pytest.mark.reference, needs_compiler]  # no task is about this

WRITE = CFUNCTYPE(None, c_void_p, c_int64, c_int64, c_void_p, c_int64)
NAN, INFINITY = float("nan"), float("inf")
# With an odd number of dimensions nothing is rotated; with these others, small integers are rotated without an error.
EXACT = [*(pytest.param(dim, False, id=f"{dim} numbers") for dim in (1, 3, 31, 33, 63, 127, 161))]
EXACT += [*(pytest.param(dim, True, id=f"{dim} integers") for dim in (4, 16, 20, 48, 64, 80, 192, 256))]


@pytest.fixture(params=FORMATS.values(), ids=list(FORMATS))
def rows(request):
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


def written(rows, x):
    """Return vectors `[T, H, D]` as C++ writes them, each token into a slot, the last token first."""
    tokens, heads, dim = x.shape
    cache = torch.full((tokens, heads, rows.row_bytes(dim)), 7, dtype=rows.dtype)
    write = WRITE(cpu.native(rows.name, x.dtype).write.value)
    for t in range(tokens):
        write(x[t].data_ptr(), heads, dim, cache.data_ptr(), tokens - 1 - t)
    return cache.flip(0)


def hard_vectors(dim, integers):
    """Return vectors `[T, 3, dim]` of all sizes, with zeros, and with numbers that no row can hold."""
    x = some(60, 3, dim, seed=dim)
    if integers:
        x = (8 * x).round().clamp(-32, 32)
    else:
        x *= 10.0 ** torch.linspace(-42, 6, 60)[:, None, None]
    x[3], x[4, 1], x[5] = 0, 1, x[5, 0, 0]
    x[6, 0, -1], x[7, 1, 0], x[8, 2, dim // 2] = NAN, INFINITY, -INFINITY
    x[9] = torch.arange(dim) % 16 * 2.0 + 0.5 * (not integers)  # half of them between two levels
    return x


@pytest.mark.parametrize(("dim", "integers"), EXACT)
def test_cpp_writes_the_rows_that_python_writes(rows, dtype, dim, integers):
    """To the byte, except that there is more than one NaN."""
    x = hard_vectors(dim, integers).to(dtype) + 0  # no -0
    want, got = rows.write(x), written(rows, x)
    wrong = ((want != got).any(-1) & x.isfinite().all(-1)).nonzero().tolist()
    assert not wrong, f"(token, head) {wrong[:5]}: bytes of a row differ from what {rows.name}'s pack gives"
    faults = [rows.unpack(of, dim, torch.float32)[6:9] for of in (want, got)]
    assert faults[0].equal(faults[1]) or torch.allclose(*faults, rtol=0, atol=0, equal_nan=True), faults


@pytest.mark.parametrize("dim", [2, 8, 32, 96, 128])
def test_cpp_rotates_before_it_rounds(rows, dtype, dim):
    """Sums are added up in another order than in a product with the matrix: a few numbers round to the next level."""
    x = (some(200, 2, dim, seed=dim) + 4 * (torch.arange(dim) == 1)).to(dtype)
    want, got = (rows.unpack(of, dim, torch.float32) for of in (rows.write(x), written(rows, x)))
    step = 2 * float((rows.rotate(x.float()) - want).abs().max())
    off = (want - got).abs()
    assert float(off.max()) < 1.1 * step and float((off > step / 100).float().mean()) < 1e-3


class Texts:
    """Some requests in a pool of rows, filled with bytes that no step has written."""

    def __init__(self, model, rows, native=True, lengths=(9, 40, 17)):
        kernel = load_kernel("cpu", "cpu", model.dtype, rows.name)
        self.pool = RowKvPool(rows, model.config, 40, 4, kernel if native else replace(kernel, native=None))
        for tensor in (*self.pool.K, *self.pool.V):
            tensor.fill_(7)
        allocator = BlockAllocator(40, 4)
        prompts = [some_ids(n, model.config.vocab_size, seed=n) for n in lengths]
        self.requests, self.model = [PackedRequest(prompt, BlockTable(allocator)) for prompt in prompts], model

    @torch.inference_mode()
    def step(self, tokens=(), rows=True):
        """Feed what has not been fed, `tokens` included; return the logits of each request's last token."""
        for request, token in zip(self.requests, tokens, strict=False):
            request.output_ids.append(token)
        reserve_all(self.requests)
        ids = torch.tensor([token for r in self.requests for token in r.token_ids[r.cur_len :]])
        meta = plan_packed(self.requests, 4, self.pool.device)
        last = meta.cu_seqlens_q[1:].long() - 1
        for request in self.requests:
            request.cur_len = len(request.token_ids)
        return self.model(ids, self.pool, meta, rows=last) if rows else self.model(ids, self.pool, meta)[last]

    @property
    def bytes(self):
        return torch.stack([*self.pool.K, *self.pool.V])


def packed(dtype=torch.float32, **config):
    return speed_up(random_model(**config).to(dtype), "packed")


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled rows", "all rows"])
def test_a_step_in_one_call_is_a_step_layer_by_layer(rows, dtype, sampled):
    model = packed(dtype)
    one_call, by_layer = Texts(model, rows), Texts(model, rows, native=False)
    for tokens in ((), (5, 6, 7), (8, 9, 10)):
        got, want = one_call.step(tokens, sampled), by_layer.step(tokens, sampled)
        if rows.name == "int8":
            assert torch.equal(got, want), "the same rows and the same kernel: every bit is the same"
        else:  # rotated in another order
            assert float((got - want).abs().max()) < 0.03 * float(want.std())
    differ = float((one_call.bytes != by_layer.bytes).float().mean())
    assert differ == 0 if rows.name == "int8" else differ < 0.01, f"{differ:.1%} of the pool's bytes differ"


def test_python_is_not_called_between_the_layers(rows, monkeypatch):
    texts = Texts(packed(), rows)
    for name in ("set_kv", "attend"):
        monkeypatch.setattr(texts.pool, name, lambda *_, name=name: pytest.fail(f"{name} was called between layers"))
    texts.step()


@pytest.mark.parametrize("change", [dict(dim=8), dict(heads=1)], ids=["narrow rows", "few heads"])
def test_rows_that_do_not_fit_are_refused_before_any_is_written(rows, change):
    model = packed()
    texts = Texts(model, rows)
    config = model.config
    shape = (change.get("heads", config.num_key_value_heads), change.get("dim", config.head_dim))
    other = KvShape(config.num_hidden_layers, shape, shape)
    texts.pool = RowKvPool(rows, other, 40, 4, texts.pool.kernel)
    for tensor in (*texts.pool.K, *texts.pool.V):
        tensor.fill_(7)
    with refused(ValueError, f"{rows.row_bytes(shape[1]) if 'dim' in change else '1 heads'}"):
        texts.step()
    assert (texts.bytes == 7).all()
