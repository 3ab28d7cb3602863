"""Lesson 15. The layout: what each layer keeps decides pools and memories, and what no pool can hold is refused."""

from types import SimpleNamespace

import pytest
import torch

from mini_engine.assembly.layout import check_kinds, kv_shape
from mini_engine.base.errors import UserError
from mini_engine.model.kinds import Full, Latent, State, Window
from tests.support import refused

pytestmark = pytest.mark.reference  # no task is about this
SMALL, LARGE = State((((4, 6), None),)), State((((8, 6), None),))


@pytest.mark.parametrize(
    ("layers", "values"),
    [
        ([Full(), Window(5), Window(7)], "windows 2 5 7"),
        ([Full(), SMALL, LARGE], "states 2"),
        ([Latent(8, 4), Latent(16, 4)], "latents 2 8 16"),
        ([Latent(8, 4), Full()], "latents K V"),
        ([Latent(8, 4), Window(5)], "latents K V"),
    ],
)
def test_what_no_pool_can_hold_together_is_refused(layers, values):
    with refused(UserError, values):
        check_kinds(layers)


@pytest.mark.parametrize(
    ("layers", "num_tensors"),
    [
        ([Full()] * 3, 3),
        ([SMALL, Full(), SMALL, Full()], 2),  # states have a pool of their own
        ([Window(5), SMALL, Full(), Window(5), Window(5)], 1),  # three windows share the full layer's tensor
        ([Window(5), Window(5), SMALL], 1),  # without a full layer, the first window keeps all tokens
    ],
)
def test_a_pool_has_a_tensor_for_each_layer_of_group_0(layers, num_tensors):
    shape = kv_shape(SimpleNamespace(layers=layers, k_shape=(2, 16), v_shape=(2, 16)))
    assert shape.num_hidden_layers == num_tensors
    assert shape.kv_bytes_per_token(torch.float32) == num_tensors * 2 * 2 * 16 * 4
