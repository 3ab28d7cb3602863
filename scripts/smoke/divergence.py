"""Course machinery. Finds the first step, layer and part at which a lesson's values differ from Hugging Face's.

Hugging Face runs once over prompt and answer, and hooks keep every value. Our model runs step by step, as in the
lesson. Each value is compared as soon as it is computed, and the first difference ends the run.
"""

import argparse
import copy
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from scripts.smoke.hugging_face import hf_generate

TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 2e-2}  # relative to the largest reference value
PARTS = {
    "input_layernorm": "the first norm",
    "self_attn.q_norm": "the q norm",
    "self_attn.k_norm": "the k norm",
    "self_attn.o_proj": "attention and its output projection",
    "post_attention_layernorm": "the second norm",
    "mlp": "the MLP",
}


@dataclass(frozen=True)
class Finding:
    """The first value that differs, or the conclusion if none does."""

    text: str
    step: int | None = None
    layer: int | None = None
    part: str | None = None
    size: float | None = None

    def __str__(self) -> str:
        return self.text


class Found(Exception):
    """Carries the first finding out of a running forward pass."""


@contextmanager
def taps(model, rope_owner: str, rope_name: str, record) -> Iterator[None]:
    """Call `record(layer, part, value)` for each value that `model` computes, in order."""
    place = {"layer": None}
    rope_module = importlib.import_module(rope_owner)
    rope = getattr(rope_module, rope_name)

    def tapped_rope(*args, **kwargs):
        out = rope(*args, **kwargs)
        record(place["layer"], "RoPE", out)
        return out

    def on_enter(index):
        return lambda module, args, kwargs: place.update(layer=index)

    def on_exit(index, part):
        return lambda module, args, kwargs, out: record(index, part, out)

    with ExitStack() as stack:
        stack.enter_context(patch.object(rope_module, rope_name, tapped_rope))
        inner = model.model
        stack.callback(
            inner.embed_tokens.register_forward_hook(on_exit(None, "the embedding"), with_kwargs=True).remove
        )
        for index, layer in enumerate(inner.layers):
            stack.callback(layer.register_forward_pre_hook(on_enter(index), with_kwargs=True).remove)
            for name, part in PARTS.items():
                module = layer.get_submodule(name)
                stack.callback(module.register_forward_hook(on_exit(index, part), with_kwargs=True).remove)
        stack.callback(inner.norm.register_forward_hook(on_exit(None, "the last norm"), with_kwargs=True).remove)
        yield


def record_hf(hf_model, ids: list[int]) -> dict:
    """Return every value of one forward pass over `ids`: (layer, part) -> `[T, ...]`. RoPE yields q and k."""
    import torch

    values = {}

    def keep(layer, part, value):
        if part == "RoPE":  # q and k, [1, H, T, D] each
            values[layer, "RoPE on q"], values[layer, "RoPE on k"] = (x[0].transpose(0, 1).float() for x in value)
        else:
            values[layer, part] = (value[0] if isinstance(value, tuple) else value)[0].float()

    owner = type(hf_model).__module__
    with torch.inference_mode(), taps(hf_model, owner, "apply_rotary_pos_emb", keep):
        hf_model(torch.tensor([ids], device=hf_model.device), use_cache=False)
    return values


class Comparer:
    """Compares our values with the reference as they are computed, and raises Found at the first difference."""

    def __init__(self, reference: dict, ids: list[int], prompt_len: int, tolerance: float) -> None:
        self.reference, self.ids, self.prompt_len, self.tolerance = reference, ids, prompt_len, tolerance
        self.step, self.worst, self.positions, self.rope_calls = -1, 0.0, [], 0

    def begin_step(self, module, args, kwargs) -> None:
        """Check the fed tokens and their positions at the start of our forward pass."""
        given = dict(zip(("token_ids", "kv", "meta"), args, strict=False)) | kwargs
        token_ids, meta = given["token_ids"], given["meta"]
        self.step, self.positions = self.step + 1, meta.positions
        last = self.prompt_len - 1 + self.step
        if last >= len(self.ids):
            raise Found(Finding("the answer continues after Hugging Face's has ended", self.step))
        if len(meta.positions) == 0 or int(meta.positions[-1]) != last:
            fed = meta.positions.tolist()[-3:]
            raise Found(
                Finding(f"step {self.step} ends at positions {fed}; its last token belongs at {last}", self.step)
            )
        wanted = [self.ids[p] for p in meta.positions.tolist()]
        if token_ids.tolist() != wanted:
            at = next(i for i, (a, b) in enumerate(zip(token_ids.tolist(), wanted, strict=True)) if a != b)
            raise Found(
                Finding(
                    f"step {self.step} feeds token {int(token_ids[at])} at position {int(meta.positions[at])}, "
                    f"Hugging Face chose {wanted[at]}; every value before agrees to {self.worst:.1e}",
                    self.step,
                )
            )

    def compare(self, layer, part, value) -> None:
        if part == "RoPE":
            self.rope_calls += 1
            part = "RoPE on q" if self.rope_calls % 2 else "RoPE on k"
        expected = self.reference[layer, part][self.positions]
        difference = (value.float().reshape(expected.shape) - expected).abs()
        size, scale = float(difference.max()), float(expected.abs().max())
        if size <= self.tolerance * max(scale, 1.0):
            self.worst = max(self.worst, size)
            return
        row = int(difference.flatten(1).amax(1).argmax())
        kind = "prefill" if self.step == 0 else "decode"
        place = "" if layer is None else f"layer {layer}, "
        raise Found(
            Finding(
                f"first difference: step {self.step} ({kind}), {place}after {part}, at position "
                f"{int(self.positions[row])}: off by {size:.3g} where values reach {scale:.3g}; "
                f"everything before agrees to {self.worst:.1e}",
                self.step,
                layer,
                part,
                size,
            )
        )


def explain(model, hf_model, generate, prompt_ids: list[int], new_tokens: int, args: argparse.Namespace) -> Finding:
    """Return the first step, layer and part at which our values differ from Hugging Face's.

    Args:
        generate: the lesson's `generate(model, prompts, args)`.
        new_tokens: the number of tokens to follow.
        args: the smoke script's arguments; `dtype` sets the tolerance.
    """
    answer = hf_generate(hf_model, prompt_ids, new_tokens, model.config.eos_token_ids)
    ids = prompt_ids + answer[:-1]
    comparer = Comparer(record_hf(hf_model, ids), ids, len(prompt_ids), TOLERANCE[args.dtype])
    alone = copy.copy(args)
    alone.max_new_tokens = new_tokens
    handle = model.register_forward_pre_hook(comparer.begin_step, with_kwargs=True)
    try:
        with taps(model, "mini_engine.model.qwen3", "apply_rope", comparer.compare):
            ours = generate(model, [prompt_ids], alone).outputs[0]
    except Found as found:
        return found.args[0]
    finally:
        handle.remove()
    if ours == answer:
        return Finding(f"alone, this prompt agrees: {len(ours)} tokens equal, every value within {comparer.worst:.1e}")
    return Finding(
        f"every value agrees to {comparer.worst:.1e}, so the difference is in choosing the next token or in stopping"
    )
