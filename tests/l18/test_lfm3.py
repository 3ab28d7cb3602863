"""Lesson 18. LFM3 over two ranks: the heads, channels and columns of every kind of layer are divided."""

import pytest
import torch

from mini_engine.model.kinds import State
from tests.l15.lfm3 import SHAPES, checkpoint, load, logits
from tests.l18.ranks import in_threads, part
from tests.support import some_ids

pytestmark = pytest.mark.reference  # no task is about this
PUBLISHED = "as published"
DIVIDED = [name for name, (_, _, changes) in SHAPES.items() if changes.get("num_key_value_heads") != 1]


@pytest.mark.parametrize("shape", DIVIDED)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_two_ranks_compute_the_same(shape, backend):
    ids = some_ids(30, 160, seed=3)
    want = logits(load(shape), ids, (17,))
    for got in in_threads(checkpoint(shape), 2, backend, lambda model: logits(model, ids, (17,))):
        torch.testing.assert_close(got, want, atol=3e-4, rtol=0.0)


def test_ranks_share_the_channels_of_convolutions():
    """Channels are independent, so a rank keeps the inputs of its own only."""
    parts = [part(checkpoint(PUBLISHED), rank, 2) for rank in range(2)]
    assert all(model.config.layers[0] == State((((24, 6), None),)) for model in parts)
    whole = load(PUBLISHED).model.layers[0].mixer.in_proj.weight
    for rank, model in enumerate(parts):
        mine = slice(24 * rank, 24 * (rank + 1))
        want = torch.cat([third[mine] for third in whole.split(48)])
        assert torch.equal(model.model.layers[0].mixer.in_proj.weight, want)
