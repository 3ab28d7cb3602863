"""Lesson 9. Joined matrices: one layer with the outputs of several, whose own weights are gone."""

import pytest
import torch
from torch import nn

from mini_engine.base.errors import UserError
from mini_engine.families.qwen3 import load_model
from mini_engine.kv.no_cache import NoCache, Recompute
from mini_engine.layers import speed_up
from mini_engine.layers.torch_layers import TorchLinear, join
from tests.support import checkpoint, refused, some_ids

pytestmark = pytest.mark.task(2)


def linears_of(*outputs, inputs=6, bias=False, dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Linear(inputs, count, bias=bias, dtype=dtype).requires_grad_(False) for count in outputs]


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("outputs", [(4, 2, 3), (5, 5), (7,)], ids=str)
def test_a_joined_layer_has_the_outputs_of_all_in_order(outputs, bias):
    linears, x = linears_of(*outputs, bias=bias), torch.randn(3, 6)
    want = torch.cat([linear(x) for linear in linears], dim=1)
    joined = join(*linears)
    assert isinstance(joined, TorchLinear), "join returns one TorchLinear"
    got = joined(x)
    assert got.shape == want.shape, f"the outputs are {sum(outputs)} in all: stack the weights along their outputs"
    torch.testing.assert_close(
        got, want, msg=lambda text: f"the outputs must come one layer after the other, biases included\n{text}"
    )
    assert (joined.bias is None) == (not bias), "without biases the joined layer has none"


def test_a_joined_layer_keeps_the_dtype():
    joined = join(*linears_of(4, 2, bias=True, dtype=torch.float16))
    assert joined.weight.dtype == torch.float16, "the joined weight must keep the dtype of the weights"
    assert joined.bias.dtype == torch.float16, "the joined bias must keep the dtype of the biases"


def bytes_of(linear):
    """Return the memory that a layer's weight keeps: none if it was deleted, emptied, or moved to `meta`."""
    weight = getattr(linear, "weight", None)
    return 0 if weight is None or weight.is_meta else weight.untyped_storage().nbytes()


@torch.inference_mode()
def test_in_bfloat16_too_the_outputs_are_those_of_all():
    linears, x = linears_of(16, 32, inputs=64, dtype=torch.bfloat16), torch.randn(9, 64).bfloat16()
    want = torch.cat([linear(x) for linear in linears], dim=1)
    torch.testing.assert_close(join(*linears)(x), want, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("outputs", [(4, 2, 3), (7,)], ids=["three", "one"])
def test_the_weights_that_were_joined_are_released(outputs):
    linears = linears_of(*outputs, bias=True)
    joined = join(*linears)
    left = [index for index, linear in enumerate(linears) if bytes_of(linear)]
    assert not left, (
        f"the linear layers {left} still have their weights: the model that was passed in keeps them alive, "
        "and every matrix is in memory twice. Take linear.weight away from it"
    )
    assert joined.weight.numel() == 6 * sum(outputs), "the joined layer must have a weight of its own"


def test_float16_takes_the_torch_backend(capfd):
    model = load_model(checkpoint("two, tied, wide heads"), torch.float16)
    with refused(UserError, "float32 bfloat16"):
        speed_up(model, "packed")
    model = speed_up(model)
    ids = torch.tensor(some_ids(9, model.config.vocab_size))
    with torch.inference_mode():
        got = model(ids, NoCache(), Recompute().plan(ids.tolist()))
    assert got.dtype == torch.float16 and got.isfinite().all()
    assert len(capfd.readouterr().err.splitlines()) == 1, "and says so"
