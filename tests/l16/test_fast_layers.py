"""Lesson 16. Lesson 9's layers under latents have the norms that the layers have."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mini_engine.latents.fast import latent_decoder
from mini_engine.latents.model import latent_model
from mini_engine.layers import speed_up
from tests.shared.compiled import needs_compiler
from tests.shared.small_latents import ROPE, SIZES, V, close, config_of, randoms

speed_up_latents = partial(speed_up, decoder=latent_decoder)
pytestmark = pytest.mark.reference
each_backend = pytest.mark.parametrize("backend", ["torch", pytest.param("packed", marks=needs_compiler)])


class Asked:
    """A store of one layer that notes what it is told and asked."""

    def set_kv(self, layer, slot_mapping, k, v):
        self.written = k, v

    def attend_latents(self, layer, q, kv_b, meta):
        self.q = q
        return torch.ones(*q.shape[:2], V)


@each_backend
@pytest.mark.parametrize("q_lora_rank", [None, 7])
def test_each_norm_keeps_its_own_eps(backend, q_lora_rank):
    """The config's eps is so large, and what is normed so small, that one in another's place would be noticed."""
    results = []
    for fast in (lambda model: model, partial(speed_up_latents, backend=backend)):
        layer, store = fast(small_model(rms_norm_eps=0.3, q_lora_rank=q_lora_rank)).model.layers[0], Asked()
        x = randoms((5, SIZES["hidden_size"]), seed=1)[0] / 10
        cos, sin = torch.ones(5, ROPE), torch.zeros(5, ROPE)
        results.append((layer(x, cos, sin, store, SimpleNamespace(slot_mapping=None)), store.q, *store.written))
    for got, want, what in zip(
        *reversed(results), ("the layer's result", "queries", "latents", "rotary keys"), strict=True
    ):
        close(got, want, f"{what}: a norm has another one's eps")


def small_model(**changes):
    """Return a random model, the same for the same changes."""
    model = latent_model(config_of(**changes)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for _, parameter in model.named_parameters():
        parameter.uniform_(-0.3, 0.3, generator=generator)
    return model
