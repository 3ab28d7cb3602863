"""Lesson 10. Fused layers: the same tokens from joined matrices and three kernels, in a fifth of the launches."""

import importlib
import importlib.util

import pytest
import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.engine.engine import Engine
from mini_engine.engine.loop import generate
from mini_engine.families.qwen3 import load_model
from mini_engine.gpu.graphs import no_graph
from mini_engine.kv.block_tensor import ForwardMeta, KvPool
from mini_engine.kv.contiguous import CachedSequence, ContiguousKv
from mini_engine.kv.no_cache import NoCache, Recompute
from mini_engine.layers.fused_layers import FusedModel, fuse
from mini_engine.pocket import POCKET_DIR
from tests.shared import plain_kernels
from tests.shared.gpu_helpers import answers, graph_engine
from tests.shared.pickled import Worker
from tests.support import FAMILIES, both, checkpoint, hf_greedy, some_ids

pytestmark = pytest.mark.reference
FAMILY = "two, tied, wide heads"
LENGTHS = [1, 2, 5, 9, 17]
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}  # the interpreter cuts bfloat16 off


@pytest.fixture(scope="module")
def interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("NOT CHECKED: the layers' Triton kernels; Triton is not installed")
    process = Worker("tests.l10.interpreter")
    yield process
    process.close()


def fused(family=FAMILY):
    """Return a fused model over lesson 0's operations, which run anywhere."""
    return fuse(load_model(checkpoint(family)), plain_kernels)


def prompts_of(vocab_size, lengths=LENGTHS):
    return [some_ids(length, vocab_size, seed=length) for length in lengths]


def wanted(hf, prompts, max_tokens):
    return [hf_greedy(hf, prompt, max_tokens + i % 3) for i, prompt in enumerate(prompts)]


# The layers


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == FAMILY else pytest.mark.nightly) for name in FAMILIES]
)
def test_tokens_equal_hugging_face_s(family):
    hf = both(family)[1]
    prompts = prompts_of(hf.config.vocab_size)
    engine = graph_engine(fused(family), no_graph, load_kernel("torch"))
    assert answers(engine, prompts) == wanted(hf, prompts, 8)


def test_any_store_of_lesson_0_and_1_will_do():
    model, hf = fused(), both(FAMILY)[1]
    prompt = some_ids(7, hf.config.vocab_size)
    contiguous = ContiguousKv(model.config, 40)
    for kv, sequence in ((NoCache(), Recompute()), (contiguous, CachedSequence(contiguous))):
        assert generate(model, kv, sequence, prompt, 8) == hf_greedy(hf, prompt, 8), type(kv).__name__


class Watched(KvPool):
    """A pool that stores in its own way, as one of int8 does, and notes what it is given."""

    direct = False

    def set_kv(self, layer, slot_mapping, k, v):
        self.given.append((layer, k.clone(), v.clone()))
        super().set_kv(layer, slot_mapping, k, v)


def one_step(model, pool_class):
    pool = pool_class(model.config, 4, 4, load_kernel("reference"), model.dtype)
    pool.given = []
    for tensor in (*pool.K, *pool.V):
        tensor.fill_(7)
    starts, lengths = torch.tensor([0, 3]).int(), torch.tensor([3]).int()
    meta = ForwardMeta(torch.arange(3), torch.tensor([8, 9, 10]), starts, lengths, torch.tensor([[2]]).int(), 4)
    with torch.inference_mode():
        return model(torch.tensor([5, 6, 7]), pool, meta), pool


def test_k_and_v_go_straight_into_the_slots_and_nowhere_else():
    (want, plain), (got, pool) = one_step(both(FAMILY)[0], KvPool), one_step(fused(), KvPool)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip((*pool.K, *pool.V), (*plain.K, *plain.V), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_pool_that_stores_in_its_own_way_is_asked_to():
    (want, _), (got, pool) = one_step(both(FAMILY)[0], KvPool), one_step(fused(), Watched)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert [layer for layer, _, _ in pool.given] == list(range(len(pool.K)))


def test_weights_are_taken_over_not_copied():
    model = load_model(checkpoint(FAMILY))
    weights = model.model.layers[0].mlp
    got = fuse(model, plain_kernels)
    assert not hasattr(weights.gate_proj, "weight"), "the joined matrix has replaced it"
    assert fuse(got) is got and got.lm_head is None
    assert (got.dtype, got.device.type) == (torch.float32, "cpu")


def test_a_cpu_is_refused_and_the_model_still_runs():
    model = load_model(checkpoint(FAMILY))
    with pytest.raises(UserError):
        fuse(model)
    assert model(torch.tensor([1, 2]), NoCache(), Recompute().plan([1, 2])) is not None


def test_kernels_that_do_not_run_are_refused_and_the_model_still_runs(monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    importlib.import_module("mini_engine.layers.layer_kernels")  # what is imported before is not interpreted
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    model = load_model(checkpoint(FAMILY))
    with pytest.raises(UserError):
        fuse(model)
    assert not isinstance(model.model, FusedModel) and hasattr(model.model.layers[0].mlp.gate_proj, "weight")


# The kernels, interpreted


def mostly_nightly(quick, *others):
    """One value for every change, the others at night: an interpreted kernel takes a while."""
    return [
        pytest.param(quick, marks=pytest.mark.ci),
        *(pytest.param(one, marks=pytest.mark.nightly) for one in others),
    ]


EACH_DTYPE = pytest.mark.parametrize("dtype", mostly_nightly(*DTYPES), ids=str)


def random(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check(interpreter, name, inputs):
    """Compare a kernel with lesson 0's operations: its result, and what it leaves in its inputs."""
    tolerance = DTYPES[inputs[0].dtype]
    got, after = interpreter(name, *inputs)
    copies = [x.clone() if torch.is_tensor(x) else x for x in inputs]
    with torch.inference_mode():
        want = getattr(plain_kernels, name)(*copies)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(after, copies, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@EACH_DTYPE
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("size", [64, 96])
def test_add_norm_equals_lesson_0_s(interpreter, size, adds, dtype):
    x, delta = random(3, size, dtype=dtype), random(3, size + 1, dtype=dtype)[:, 1:]  # not contiguous
    check(interpreter, "add_norm", [x, delta if adds else None, random(size, dtype=dtype), 1e-6])


@EACH_DTYPE
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 16), (3, 1, 24), (2, 2, 80)])
def test_norm_rope_equals_lesson_0_s(interpreter, heads, kv_heads, dim, dtype):
    tokens = 3
    angles = random(tokens, dim // 2, dtype=torch.float32).repeat(1, 2) * 9
    cache = [torch.full((5, 4, kv_heads, dim), 7.0, dtype=dtype) for _ in "kv"]
    inputs = [random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype), random(2, dim, dtype=dtype)]
    inputs += [angles.cos().to(dtype), angles.sin().to(dtype), 1e-6, torch.tensor([17, 4, 9]), *cache]
    check(interpreter, "norm_rope", inputs)


@EACH_DTYPE
@pytest.mark.parametrize("size", [64, 1000, 1100])
def test_silu_mul_equals_lesson_0_s(interpreter, size, dtype):
    check(interpreter, "silu_mul", [random(2, 2 * size, dtype=dtype) * 4])


@pytest.mark.ci
@pytest.mark.parametrize("name, columns", [("add_norm", 8), ("norm_rope", 32), ("silu_mul", 8)])
def test_no_rows_are_no_launch(interpreter, name, columns):
    x = torch.zeros(0, columns)
    more = {"add_norm": [None, torch.ones(8), 1e-6], "silu_mul": []}
    cache = torch.zeros(1, 1, 8)
    more["norm_rope"] = [torch.ones(2, 8), x, x, 1e-6, torch.zeros(0, dtype=torch.int64), cache, cache]
    assert len(interpreter(name, x, *more[name])[0]) == 0


# On a GPU


@pytest.mark.gpu
def test_on_a_gpu_fused_layers_give_the_tokens_of_lesson_0_s():
    prompts = prompts_of(load_model(POCKET_DIR).config.vocab_size)
    found = []
    for change in (lambda model: model, fuse):
        model = change(load_model(POCKET_DIR, torch.float32, "cuda"))
        found.append(answers(Engine.for_model(model, num_blocks=64), prompts, 16))
    assert found[0] == found[1]


@pytest.mark.gpu
def test_on_a_gpu_fused_layers_round_no_more_than_lesson_0_s_do():
    """In bfloat16 another order of sums decides near-ties otherwise, so logits are compared, with float32's."""
    ids = torch.tensor(some_ids(33, load_model(POCKET_DIR).config.vocab_size), device="cuda")
    models = [load_model(POCKET_DIR, dtype, "cuda") for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)]
    with torch.inference_mode():
        meta = Recompute("cuda").plan(ids.tolist())
        want, theirs, ours = (model(ids, NoCache(), meta).float() for model in (*models[:2], fuse(models[2])))
    errors = [float((got - want).norm() / want.norm()) for got in (theirs, ours)]
    assert errors[1] < 1.3 * errors[0] + 1e-3, f"relative errors of lesson 0's and of the fused layers: {errors}"
