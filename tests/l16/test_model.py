"""Lesson 16. What attention stores of a token and asks of the store, and that Hugging Face computes the same."""

from types import SimpleNamespace

import pytest
import torch

from mini_engine.checkpoint.config import RopeScaling
from mini_engine.latents.model import LatentAttention, latent_model, rotate_end
from mini_engine.model.layers import RMSNorm
from mini_engine.model.rope import RotaryEmbedding
from tests.shared.small_latents import HEADS, NOPE, RANK, ROPE, SIZES, V, attention, close, config_of, randoms

LAYER = 1
TOKENS = 7
both_ropes = pytest.mark.parametrize("rope_interleave", [True, False], ids=["interleaved", "plain"])


class Recording:
    """A store that notes what it is told and asked, and answers with what it was given."""

    def __init__(self, answer=None):
        self.answer, self.calls, self.written, self.asked = answer, [], None, None

    def set_kv(self, layer, slot_mapping, k, v):
        self.calls.append("set_kv")
        self.written = SimpleNamespace(layer=layer, slots=slot_mapping, k=k, v=v)

    def attend_latents(self, layer, q, kv_b, meta):
        self.calls.append("attend_latents")
        self.asked = SimpleNamespace(layer=layer, q=q, kv_b=kv_b, meta=meta)
        return torch.zeros(len(q), HEADS, V) if self.answer is None else self.answer


class Remembering(Recording):
    """A store of one sequence that attends, by the keys and values of all heads."""

    def __init__(self, scale):
        super().__init__()
        self.scale, self.c, self.r = scale, [], []

    def set_kv(self, layer, slot_mapping, k, v):
        self.c.append(k)
        self.r.append(v)

    def attend_latents(self, layer, q, kv_b, meta):
        return attention(q, torch.cat(self.c)[:, 0], torch.cat(self.r)[:, 0], kv_b, self.scale).float()


def make(**changes):
    """Return attention with random weights."""
    layer = LatentAttention(config_of(**changes), LAYER).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0, 0.3, generator=generator)
    return layer


def hidden_states():
    return randoms((TOKENS, SIZES["hidden_size"]), seed=5)[0]


def run(layer, store, x, first=0):
    """Run the layer over tokens whose first one has this position; return its output and the cosines and sines."""
    positions = torch.arange(first, first + len(x))
    cos, sin = RotaryEmbedding(layer.config)(positions, x.dtype)
    meta = SimpleNamespace(slot_mapping=positions + 16, positions=positions)
    return layer(x, cos, sin, store, meta), cos, sin, meta


def compressed(layer, x):
    """Return what the layer makes of a token before it is normed and rotated."""
    return layer.kv_a_proj_with_mqa(x).split((RANK, ROPE), dim=-1)


@pytest.mark.task(1)
def test_the_latent_is_stored_with_its_norm_and_once_for_all_heads():
    layer, store, x = make(), Recording(), hidden_states()
    run(layer, store, x)
    assert store.calls == ["set_kv", "attend_latents"], "write this step's tokens first: they see themselves"
    raw, rope = compressed(layer, x)
    whole = torch.cat((raw, rope), dim=1)
    guesses = {
        "it has not been normed: kv_a_layernorm comes before the cache": raw[:, None],
        "the norm was taken over latent and rotary key together": (
            layer.kv_a_layernorm.weight * raw * (whole.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        )[:, None],
        "it is the rotary key: K holds latents, V rotary keys": store.written.v,
    }
    teach = f"k of set_kv is the latent, normed, [{TOKENS}, 1, {RANK}]: what all heads' keys and values are made of"
    close(store.written.k, layer.kv_a_layernorm(raw)[:, None], teach, guesses)


@pytest.mark.task(1)
@both_ropes
def test_the_rotary_key_is_stored_rotated_and_once_for_all_heads(rope_interleave):
    layer, store, x = make(rope_interleave=rope_interleave), Recording(), hidden_states()
    _, cos, sin, _ = run(layer, store, x)
    raw = compressed(layer, x)[1][:, None]
    other = config_of(rope_interleave=not rope_interleave)
    guesses = {
        "it has not been rotated": raw,
        "it was rotated in the other pairs: mind rope_interleave, in keys as in queries": rotate_end(
            raw, cos, sin, other
        ),
        "it was normed: the norm is the latent's alone": rotate_end(
            raw * (raw.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), cos, sin, layer.config
        ),
    }
    teach = f"v of set_kv is the rotary key, rotated to its position and not normed, [{TOKENS}, 1, {ROPE}]"
    close(store.written.v, rotate_end(raw, cos, sin, layer.config), teach, guesses)


@pytest.mark.task(1)
@both_ropes
@pytest.mark.parametrize("q_lora_rank", [None, 7])
def test_queries_are_rotated_only_at_their_end(rope_interleave, q_lora_rank):
    layer = make(rope_interleave=rope_interleave, q_lora_rank=q_lora_rank)
    store, x = Recording(), hidden_states()
    _, cos, sin, _ = run(layer, store, x)
    q = layer.queries(x).view(TOKENS, HEADS, NOPE + ROPE)
    got, teach = store.asked.q, f"q of attend_latents is [{TOKENS}, {HEADS}, {NOPE} + {ROPE}]"
    assert list(got.shape) == list(q.shape), teach
    close(got[..., :NOPE], q[..., :NOPE], f"the first {NOPE} numbers of a query have no position: leave them")
    turned = q[..., NOPE:]
    guesses = {
        "they have not been rotated": turned,
        "they were rotated in the other pairs: mind rope_interleave": rotate_end(
            turned, cos, sin, config_of(rope_interleave=not rope_interleave)
        ),
    }
    close(got[..., NOPE:], rotate_end(turned, cos, sin, layer.config), f"the last {ROPE} are rotated", guesses)


@pytest.mark.task(1)
def test_the_store_is_given_the_matrix_of_each_head():
    layer, store = make(), Recording()
    run(layer, store, hidden_states())
    weight, size = layer.kv_b_proj.weight, NOPE + V
    want = torch.stack([weight[head * size : (head + 1) * size] for head in range(HEADS)])
    guesses = {
        "the rows were dealt to the heads in turn": weight.view(size, HEADS, RANK).transpose(0, 1),
        "the weight was transposed: a Linear's is [out, in] already": weight.T.reshape(HEADS, size, RANK),
    }
    teach = (
        f"kv_b is [{HEADS}, {NOPE} + {V}, {RANK}]: the first {size} rows of the weight are head 0's, the next head 1's"
    )
    close(store.asked.kv_b, want, teach, guesses)


@pytest.mark.task(1)
def test_the_store_is_told_layer_slots_and_plan():
    layer, store = make(), Recording()
    _, _, _, meta = run(layer, store, hidden_states())
    assert store.written.layer == LAYER, "set_kv: this layer's caches"
    assert store.asked.layer == LAYER, "attend_latents: this layer's caches"
    assert store.written.slots.tolist() == meta.slot_mapping.tolist(), "set_kv: the slots are the plan's slot_mapping"
    assert store.asked.meta is meta, "the store gets the plan as it is"


@pytest.mark.task(1)
def test_the_output_is_made_of_all_heads_values():
    answer = randoms((TOKENS, HEADS, V), seed=9)[0]
    layer = make()
    out, *_ = run(layer, Recording(answer), hidden_states())
    teach = f"the answer [{TOKENS}, {HEADS}, {V}] goes through o_proj, head after head"
    close(out, answer.reshape(TOKENS, -1) @ layer.o_proj.weight.T, teach, {"o_proj is missing": answer.flatten(1)})


FAMILIES = {
    "queries from the hidden state": {},
    "queries from a latent": dict(q_lora_rank=7),
    "plain RoPE": dict(rope_interleave=False),
    "biases": dict(q_lora_rank=7, attention_bias=True),
    "one head": dict(num_attention_heads=1, num_key_value_heads=1),
}


class Caching:
    """What transformers calls a cache, for one layer: it notes what is cached."""

    def update(self, latents, rotary_keys, layer_idx, **kwargs):
        self.c, self.r = latents, rotary_keys
        return latents, rotary_keys


def theirs(layer):
    """Return transformers' attention with the weights of ours."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config, names = layer.config, ("q_lora_rank", "rope_interleave", "attention_bias", "num_attention_heads")
    sizes = SIZES | {name: getattr(config, name) for name in (*names, "num_key_value_heads")}
    sizes |= {"rope_parameters": rope_parameters(config)}
    attention = DeepseekV3Attention(DeepseekV3Config(**sizes, attn_implementation="eager"), LAYER)
    attention.load_state_dict(layer.state_dict())
    return attention.requires_grad_(False)


def rope_parameters(config):
    scaling = config.rope_scaling
    yarn = dict(factor=scaling.factor, mscale=scaling.mscale, mscale_all_dim=scaling.mscale_all_dim)
    return {"rope_type": scaling.rope_type, "rope_theta": config.rope_theta} | (
        yarn if scaling.rope_type == "yarn" else {}
    )


@pytest.mark.task(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_hugging_face_computes(family):
    layer, x, cache = make(**FAMILIES[family]), hidden_states(), Caching()
    cos, sin = RotaryEmbedding(layer.config)(torch.arange(TOKENS), x.dtype)
    hidden = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    want, _ = theirs(layer)(x[None], (cos[None], sin[None]), hidden, cache)
    store = Remembering(layer.config.attention_scale)
    out = torch.cat([run(layer, store, x[:5])[0], run(layer, store, x[5:], first=5)[0]])
    close(torch.cat(store.c)[:, 0], cache.c[0, 0], f"{family}: transformers caches these latents")
    close(torch.cat(store.r)[:, 0], cache.r[0, 0], f"{family}: transformers caches these rotary keys")
    close(out, want[0], f"{family}: five tokens, then two behind them, give the outputs of transformers")


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512)


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(),
        RopeScaling(**YARN),
        RopeScaling(**YARN, mscale=1.0, mscale_all_dim=1.0),
        RopeScaling(**YARN, mscale=0.7, mscale_all_dim=0.5),
    ],
    ids=["default", "yarn", "mscale_all_dim 1", "mscale_all_dim 0.5"],
)
def test_scores_are_scaled_as_in_hugging_face(scaling):
    layer = make(rope_scaling=scaling)
    got, want = layer.config.attention_scale, theirs(layer).scaling
    assert got == pytest.approx(want), "nope + rope to the power of -1/2, times YaRN's sharpness squared"


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_the_norms_of_latents_have_an_eps_of_their_own(eps):
    """Hidden states are so small here that any other eps would show. transformers gives these norms none but 1e-6."""
    layer, store, x = make(rms_norm_eps=eps, q_lora_rank=7), Recording(), hidden_states() / 1000
    _, cos, sin, _ = run(layer, store, x)

    def normed(c, weight):
        return weight * c * (c.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    latent = normed(compressed(layer, x)[0], layer.kv_a_layernorm.weight)
    close(store.written.k, latent[:, None], "the norm of latents adds 1e-6, whatever rms_norm_eps says")
    q = layer.q_b_proj(normed(layer.q_a_proj(x), layer.q_a_layernorm.weight)).view(TOKENS, HEADS, NOPE + ROPE)
    close(store.asked.q, rotate_end(q, cos, sin, layer.config), "so does the norm of what queries are made of")


def test_all_other_norms_have_the_config_s_eps():
    model = latent_model(config_of(rms_norm_eps=0.3, q_lora_rank=7))
    eps = {name.split(".")[-1]: norm.eps for name, norm in model.named_modules() if isinstance(norm, RMSNorm)}
    own = dict.fromkeys(("q_a_layernorm", "kv_a_layernorm"), 1e-6)
    assert eps == own | dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), 0.3)
