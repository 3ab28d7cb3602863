"""Course machinery. Mixtures of experts: routing, grouping, shares of ranks, and fast layers.

Protects readers from answers of experts that are swapped, lost or counted twice.
"""

import pytest
import torch
import torch.nn.functional as F

from mini_engine.base.errors import UserError
from mini_engine.experts.experts import Experts
from mini_engine.experts.fast import experts_maker
from mini_engine.experts.router import SoftmaxRouter
from mini_engine.layers import native

H, WIDTH, E = 16, 12, 5


@pytest.fixture
def experts():
    torch.manual_seed(0)
    found = Experts(E, H, WIDTH).requires_grad_(False)
    for weight in found.parameters():
        weight.normal_()
    return found


def expected(experts, x, choices, weights):
    """Return what each token's experts make of it, one token and one expert at a time, in float64."""
    rows = []
    for row, its, shares in zip(x.double(), choices.tolist(), weights.double(), strict=True):
        total = torch.zeros(H, dtype=torch.float64)
        for expert, share in zip(its, shares, strict=True):
            gate, up = (experts.gate_up_proj[expert].double() @ row).chunk(2)
            total += share * (experts.down_proj[expert].double() @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def some_choices(num_tokens, k, seed=0):
    """Return x, experts and weights of some tokens; no token has an expert twice."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(num_tokens, E, generator=generator).argsort(1)[:, :k]
    return torch.randn(num_tokens, H, generator=generator), chosen, torch.rand(num_tokens, k, generator=generator)


@pytest.mark.parametrize("backend", ["torch", pytest.param("packed", marks=pytest.mark.ci)])  # it compiles
@pytest.mark.parametrize(("num_tokens", "k"), [(1, 1), (1, 3), (9, 2), (40, 5), (700, 2), (0, 2)])
def test_every_token_gets_the_weighted_sum_of_its_experts(experts, num_tokens, k, backend):
    x, chosen, weights = some_choices(num_tokens, k)
    got = experts(x, chosen, weights)
    want = expected(experts, x, chosen, weights) if num_tokens else torch.zeros(0, H)
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-3)
    try:
        fast = experts_maker(native.Functions(torch.float32) if backend == "packed" else None)(experts)
    except UserError as why:
        pytest.skip(f"NOT CHECKED: {why}")
    torch.testing.assert_close(fast(x, chosen, weights), got, rtol=1e-5, atol=1e-3)


def test_sums_are_rounded_once():
    """In bfloat16, a sum that is rounded after each expert would lose the small ones."""
    experts = Experts(E, H, WIDTH).to(torch.bfloat16).requires_grad_(False)
    experts.run = lambda expert, rows: rows.new_full(rows.shape, [256.0, 1.0, 1.0, 1.0, 1.0][expert])
    x = torch.zeros(1, H, dtype=torch.bfloat16)
    got = experts(x, torch.arange(E)[None], torch.ones(1, E))
    assert got.dtype == torch.bfloat16 and got.tolist() == [[260.0] * H]


def test_only_the_weights_of_chosen_experts_are_read(experts):
    x, _, weights = some_choices(6, 2)
    chosen = torch.tensor([[0, 3], [3, 0]] * 3)
    want = experts(x, chosen, weights)
    experts.gate_up_proj[[1, 2, 4]] = float("nan")
    experts.down_proj[[1, 2, 4]] = float("nan")
    assert torch.equal(experts(x, chosen, weights), want)


@pytest.mark.parametrize("first", [0, 2, 3])
def test_shares_of_the_experts_add_up_to_all_of_them(experts, first):
    x, chosen, weights = some_choices(30, 3)
    parts = []
    for start, stop in ((0, first), (first, E)):
        part = Experts(stop - start, H, WIDTH).requires_grad_(False)
        part.gate_up_proj.copy_(experts.gate_up_proj[start:stop])
        part.down_proj.copy_(experts.down_proj[start:stop])
        part.first = start
        parts.append(part(x, chosen, weights))
    torch.testing.assert_close(sum(parts), experts(x, chosen, weights), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_router_chooses_the_most_probable_experts(normalize):
    router = SoftmaxRouter(E, 2, H, normalize).requires_grad_(False)
    router.weight.copy_(torch.eye(E, H))
    x = torch.zeros(2, H)
    x[0, 3], x[0, 1], x[1, 4], x[1, 0] = 2.0, 1.0, 3.0, 2.5
    chosen, weights = router(x)
    probabilities = x[:, :E].softmax(-1)
    want = torch.stack([probabilities[0, [3, 1]], probabilities[1, [4, 0]]])
    assert chosen.tolist() == [[3, 1], [4, 0]] and weights.dtype == torch.float32
    torch.testing.assert_close(weights, want / want.sum(-1, keepdim=True) if normalize else want)
