"""Course machinery. All that follows a mixer in a layer with experts, in one call: the same numbers as torch's modules.

Protects readers from a router in C++ that sends tokens elsewhere, or weighs the answers differently.
"""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mini_engine.base.errors import UserError
from mini_engine.experts.experts import Experts
from mini_engine.experts.feed_forward import SparseFeedForward
from mini_engine.experts.router import SoftmaxRouter
from mini_engine.experts.sparse import PackedSparse
from mini_engine.families.deepseek_experts import GroupRouter
from mini_engine.layers import native
from mini_engine.layers.packed_layers import PackedLinear
from mini_engine.model.layers import Linear, RMSNorm, SwiGLU

H, WIDTH, SHARED, MIXED, ROWS = 40, 20, 28, 24, 400  # so many rows are divided among threads, few share the weights


def of_groups(scores: str, **changes: Any) -> GroupRouter:
    """Return a router among 24 experts in 6 groups."""
    config = dict(scoring_func=scores, n_group=6, topk_group=3, num_experts_per_tok=5, routed_experts=24)
    config |= dict(hidden_size=H, norm_topk_prob=True, routed_scaling_factor=2.5)
    return GroupRouter(SimpleNamespace(**config | changes))


ROUTERS: dict[str, Callable[[], Any]] = {
    "probabilities": lambda: SoftmaxRouter(20, 3, H, normalize=False),
    "normalised": lambda: SoftmaxRouter(20, 3, H, normalize=True),
    "all experts": lambda: SoftmaxRouter(7, 7, H, normalize=False),
    "sigmoids, groups": lambda: of_groups("sigmoid"),
    "sigmoids as they are": lambda: of_groups("sigmoid", norm_topk_prob=False),
    "sigmoids, one group": lambda: of_groups("sigmoid", n_group=1, topk_group=1),
    "probabilities, groups": lambda: of_groups("softmax", norm_topk_prob=False),
}


def block_of(router: Any, dtype: torch.dtype = torch.float32, gated: bool = False, shared: bool = True) -> Any:
    """Return a feed-forward block with random weights."""
    gate = Linear(H, 1, bias=False) if gated else None
    experts = Experts(len(router.weight), H, WIDTH)
    block = SparseFeedForward(router, experts, SwiGLU(H, SHARED) if shared else None, gate).requires_grad_(False)
    for weight in block.parameters():
        weight.normal_(std=0.5)
    return block.to(dtype)


def packed(block: Any, norm: Any, out: torch.Tensor | None = None) -> PackedSparse:
    """Return the same in one call. out: the mixer's last matrix; by default, the mixer adds nothing."""
    out = norm.weight.new_zeros(H, MIXED) if out is None else out
    try:
        linear = partial(PackedLinear, native.Functions(norm.weight.dtype))
        return PackedSparse(copy.deepcopy(block), norm, linear, linear(out.clone()))
    except UserError as why:
        pytest.skip(f"NOT CHECKED: {why}")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("router", ROUTERS)
def test_one_call_adds_what_the_modules_do_whatever_rows_there_are(router, gated):
    torch.manual_seed(0)
    block, norm = block_of(ROUTERS[router](), gated=gated), RMSNorm(H, 1e-6).requires_grad_(False)
    norm.weight.normal_()
    x, mixed, out = torch.randn(ROWS, H), torch.randn(ROWS, MIXED), torch.randn(H, MIXED)
    middle = x + mixed @ out.T
    fast = packed(block, norm, out)
    got = fast(x.clone(), mixed)
    torch.testing.assert_close(got, middle + block(norm(middle)), rtol=1e-4, atol=1e-3)
    for start, stop in ((7, 8), (100, 140), (5, 5)):
        assert torch.equal(fast(x[start:stop].clone(), mixed[start:stop]), got[start:stop])


def test_the_number_of_threads_changes_no_bit(torch_threads):
    torch.manual_seed(1)
    norm, x = RMSNorm(H, 1e-6).requires_grad_(False), torch.randn(ROWS, H)
    norm.weight.fill_(1.0)
    fast = packed(block_of(of_groups("sigmoid")), norm, torch.randn(H, MIXED))
    mixed = torch.randn(ROWS, MIXED)
    want = fast(x.clone(), mixed)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(fast(x.clone(), mixed), want)


def test_of_equally_wanted_experts_the_first_are_chosen():
    torch.manual_seed(3)
    router = of_groups("sigmoid", num_experts_per_tok=4)
    block, norm, x = block_of(router), RMSNorm(H, 1e-6).requires_grad_(False), torch.randn(3, H)
    norm.weight.fill_(1.0)
    block.gate.weight.zero_()
    block.gate.e_score_correction_bias.copy_(torch.tensor([0.0, 1, 1, 0, 0, 0] * 4))  # 1, 2, 7, 8, 13, 14, 19, 20
    chosen = torch.tensor([[1, 2, 7, 13]]).expand(3, -1)  # of 0 … 3 and 12 … 15, and of the first of four equal groups
    want = x + block.experts(norm(x), chosen, torch.full((3, 4), 2.5 / 4)) + block.shared_expert(norm(x))
    torch.testing.assert_close(packed(block, norm)(x.clone(), torch.zeros(3, MIXED)), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("gated", [True, False])
def test_logits_and_weights_are_rounded_as_in_the_modules(gated):
    """Two blocks that are each other's opposite: what is left shows each weight's last bits."""
    torch.manual_seed(2)
    number = 1 if gated else 2
    block = block_of(SoftmaxRouter(number, number, H, normalize=False), torch.bfloat16, gated)
    gate_up, down = block.experts.gate_up_proj, block.experts.down_proj
    down *= 100  # so that x hardly counts
    if gated:
        shared = block.shared_expert = SwiGLU(H, WIDTH).to(torch.bfloat16).requires_grad_(False)
        shared.gate_proj.weight.copy_(gate_up[0, :WIDTH])
        shared.up_proj.weight.copy_(gate_up[0, WIDTH:])
        shared.down_proj.weight.copy_(-down[0])
    else:
        block.shared_expert = None
        gate_up[1], down[1] = gate_up[0], -down[0]
        block.gate.weight[1] = block.gate.weight[0] * 1.02
    norm = RMSNorm(H, 1e-6).to(torch.bfloat16).requires_grad_(False)
    norm.weight.fill_(1.0)
    signs = torch.randn(ROWS, H).sign().to(torch.bfloat16)  # the norm leaves them as they are
    if gated:
        signs = signs[block.shared_expert_gate(signs)[:, 0] > 3]  # rounding is large beside 1 - sigmoid
    nothing = signs.new_zeros(len(signs), MIXED)
    got = packed(block, norm)(signs.clone(), nothing).float() - signs
    want = block.experts(signs, *block.gate(signs)).float()
    if gated:
        want *= 1 - block.shared_expert_gate(signs).sigmoid().float()
    assert (got - want).norm() < 0.01 * want.norm()


def test_rows_of_another_width_are_refused():
    norm = RMSNorm(H, 1e-6).requires_grad_(False)
    x = torch.ones(2, H)
    fast = packed(block_of(SoftmaxRouter(4, 2, H, normalize=True)), norm, torch.ones(H, MIXED))
    with pytest.raises(ValueError, match="this layer takes"):
        fast(x, torch.ones(2, MIXED + 1))
    assert x.eq(1).all()
