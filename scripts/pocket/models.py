"""Course machinery. The initialization that makes a delta net remember, which pocket-hybrid was trained from.

transformers starts every `dt_bias` at one, and such a layer forgets within a few tokens: zeroing its state changes
almost no output, so a test on a random model could not see a lost state. Mamba's initialization (Gu and Dao, 2023)
spreads the time steps over 0.001 to 0.1 instead.
"""

import math

import torch
from torch import nn

SHORTEST_STEP, LONGEST_STEP = 0.001, 0.1


@torch.no_grad()
def start_time_steps(model: nn.Module) -> None:
    """Set every `dt_bias` so that softplus(dt_bias) is log-uniform between SHORTEST_STEP and LONGEST_STEP."""
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            low, high = math.log(SHORTEST_STEP), math.log(LONGEST_STEP)
            steps = torch.empty_like(parameter).uniform_(low, high).exp()
            parameter.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
