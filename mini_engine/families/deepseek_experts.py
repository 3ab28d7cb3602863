"""Lesson 16. The experts of DeepSeek-V2 and DeepSeek-V3: what config.json may say of them, and their router."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic_core import core_schema as s
from torch import Tensor, nn

from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config_schema import FLAG, POSITIVE, WIDTH, check, check_multiple, validator
from mini_engine.experts.config import COUNT
from mini_engine.experts.router import Rules

SIZES = dict(n_routed_experts=COUNT, n_shared_experts=COUNT, moe_intermediate_size=WIDTH, n_group=COUNT)
SIZES |= dict(topk_group=COUNT, routed_scaling_factor=POSITIVE, moe_layer_freq=s.int_schema(ge=1, le=1))
SOFTMAX, SIGMOID = "softmax", "sigmoid"
V2 = dict(scoring_func=s.literal_schema([SOFTMAX]), norm_topk_prob=s.literal_schema([False]))
V2 |= dict(topk_method=s.literal_schema(["greedy", "group_limited_greedy"]))
V3 = dict(scoring_func=s.literal_schema([SIGMOID]), norm_topk_prob=FLAG, topk_method=s.literal_schema(["noaux_tc"]))
SCHEMAS = {
    "deepseek_v2": validator(dict(num_experts_per_tok=COUNT), SIZES | V2),
    "deepseek_v3": validator({}, SIZES | V3 | dict(num_experts_per_tok=COUNT)),
}
EPSILON = 1e-20  # added to the sum by which weights are divided
DEFAULTS: dict[str, dict[str, Any]] = {  # transformers' values for settings that the file lacks
    "deepseek_v2": dict(n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1407, routed_scaling_factor=1.0)
    | dict(scoring_func=SOFTMAX, norm_topk_prob=False, n_group=1, topk_group=1),
    "deepseek_v3": dict(n_routed_experts=256, n_shared_experts=1, moe_intermediate_size=2048, routed_scaling_factor=2.5)
    | dict(scoring_func=SIGMOID, norm_topk_prob=True, n_group=8, topk_group=4, num_experts_per_tok=8),
}


def read_experts(kind: str, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the validated settings of a model with experts, by the names of DeepseekConfig's fields.

    Raises:
        UserError: a setting is missing or impossible; one sentence names it.
    """
    config = DEFAULTS[kind] | check(SCHEMAS[kind], raw, path)
    if config.get("topk_method") != "group_limited_greedy" and kind == "deepseek_v2":
        config |= dict(n_group=1, topk_group=1)
    check_multiple(config, "n_routed_experts", "n_group", path)
    size, groups = config["n_routed_experts"] // config["n_group"], config["topk_group"]
    if groups > config["n_group"] or config["num_experts_per_tok"] > groups * size:
        raise UserError(
            f"{path} has num_experts_per_tok = {config['num_experts_per_tok']} and topk_group = {groups}, but there "
            f"are n_group = {config['n_group']} groups of {size} experts"
        )
    if config["scoring_func"] == SIGMOID and size < 2:
        raise UserError(f"{path} has n_group = {config['n_group']} groups of one expert; a group needs at least two")
    return config | {
        "num_experts": config["n_routed_experts"],
        "routed_experts": config["n_routed_experts"],
        "shared_size": config["n_shared_experts"] * config["moe_intermediate_size"],
    }


class GroupRouter(nn.Module):
    """Sends each token to its k best experts of its best groups, as `SoftmaxRouter` does without groups.

    Scores are probabilities, and a group is as good as its best expert; or they are sigmoids plus a bias, and a group
    is as good as its two best experts together. The bias balances the load (Wang et al., 2024, arXiv:2408.15664): it
    counts for the choice, not for the weights.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.judges = config, 1
        self.weight = nn.Parameter(torch.empty(config.routed_experts, config.hidden_size))
        self.e_score_correction_bias: Any = None
        if config.scoring_func == SIGMOID:
            self.judges = 2
            self.e_score_correction_bias = nn.Parameter(torch.empty(config.routed_experts))

    @property
    def rules(self) -> Rules:
        """How it chooses, in numbers."""
        return Rules(
            self.config.num_experts_per_tok,
            has_sigmoids=self.config.scoring_func == SIGMOID,
            bias=self.e_score_correction_bias,
            normalizes=self.config.norm_topk_prob,
            epsilon=EPSILON,
            scale=self.config.routed_scaling_factor,
            groups=self.config.n_group,
            kept=self.config.topk_group,
            judges=self.judges,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x.float(), self.weight.float())
        if self.e_score_correction_bias is None:
            scores = wanted = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            wanted = scores + self.e_score_correction_bias
        experts = self.in_best_groups(wanted).topk(self.config.num_experts_per_tok).indices
        weights = scores.gather(1, experts)
        if self.config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + EPSILON)
        return experts, weights * self.config.routed_scaling_factor

    def in_best_groups(self, wanted: Tensor) -> Tensor:
        """Return `[T, E]`: what makes each expert wanted, -inf outside a token's best groups."""
        groups = wanted.unflatten(1, (self.config.n_group, -1))
        best = groups.topk(self.judges).values.sum(-1).topk(self.config.topk_group).indices
        closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
        return groups.masked_fill(closed[..., None], -torch.inf).flatten(1)
