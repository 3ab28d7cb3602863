"""Lesson 18. LFM3 over two ranks: the heads, channels and columns of every kind of layer are divided."""

import pytest
import torch

from mini_engine.model.kinds import State
from tests.l15.lfm3 import checkpoint, load
from tests.l18.ranks import part

pytestmark = pytest.mark.reference  # no task is about this
PUBLISHED = "as published"


def test_ranks_share_the_channels_of_convolutions():
    """Channels are independent, so a rank keeps the inputs of its own only."""
    parts = [part(checkpoint(PUBLISHED), rank, 2) for rank in range(2)]
    assert all(model.config.layers[0] == State((((24, 6), None),)) for model in parts)
    whole = load(PUBLISHED).model.layers[0].mixer.in_proj.weight
    for rank, model in enumerate(parts):
        mine = slice(24 * rank, 24 * (rank + 1))
        want = torch.cat([third[mine] for third in whole.split(48)])
        assert torch.equal(model.model.layers[0].mixer.in_proj.weight, want)
