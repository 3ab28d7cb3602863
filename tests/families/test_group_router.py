"""Course machinery. The router of DeepSeek's experts: groups, and a bias that counts for the choice alone.

Protects readers from tokens that are sent to other experts than in training, which no error would show.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mini_engine.families.deepseek_experts import GroupRouter

SOFTMAX: dict[str, Any] = dict(scoring_func="softmax", n_group=2, topk_group=1, num_experts_per_tok=2)
SIGMOID = SOFTMAX | dict(scoring_func="sigmoid")


def routed(logits: list[float], settings: dict[str, Any], bias: list[float] | None = None):
    """Return experts and weights of one token with these logits."""
    usual = dict(routed_experts=len(logits), hidden_size=1, norm_topk_prob=False, routed_scaling_factor=1.0)
    router = GroupRouter(SimpleNamespace(**usual | settings)).requires_grad_(False)
    router.weight.copy_(torch.tensor(logits)[:, None])
    if bias is not None:
        router.e_score_correction_bias.copy_(torch.tensor(bias))
    experts, weights = router(torch.ones(1, 1))
    return experts[0].tolist(), weights[0]


@pytest.mark.parametrize(
    ("logits", "settings", "chosen"),
    [
        ([4.0, 0.0, 3.0, 3.0], SOFTMAX, [0, 1]),  # the group with the best expert
        ([4.0, 0.0, 3.0, 2.9], SIGMOID, [2, 3]),  # the group whose two best are best together
        ([4.0, 0.0, 3.0, 2.9], SIGMOID | dict(topk_group=2), [0, 2]),
        ([1.0, 2.0, 4.0, 3.0], SOFTMAX | dict(n_group=1, num_experts_per_tok=3), [2, 3, 1]),
    ],
)
def test_experts_are_those_of_the_best_groups(logits, settings, chosen):
    bias = [0.0] * len(logits) if settings["scoring_func"] == "sigmoid" else None
    experts, weights = routed(logits, settings, bias)
    scores = torch.tensor(logits).sigmoid() if bias else torch.tensor(logits).softmax(0)
    assert experts == chosen and weights.dtype == torch.float32
    torch.testing.assert_close(weights, scores[chosen])


def test_the_bias_chooses_and_does_not_weigh():
    experts, weights = routed([1.0, 2.0, -1.0, -2.0], SIGMOID, [0.0, 0.0, 5.0, 5.0])
    assert experts == [2, 3]
    torch.testing.assert_close(weights, torch.tensor([-1.0, -2.0]).sigmoid())


@pytest.mark.parametrize("total", [1.0, 2.5])
def test_normalised_weights_add_up_to_the_scaling_factor(total):
    _, weights = routed(
        [1.0, 2.0, 3.0, 4.0], SIGMOID | dict(norm_topk_prob=True, routed_scaling_factor=total), [0.0] * 4
    )
    torch.testing.assert_close(weights.sum(), torch.tensor(total))
