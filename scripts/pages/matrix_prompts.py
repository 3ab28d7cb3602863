"""Course machinery. The prompts of the cells of "What works with what", and the checkpoints that answer them."""

import functools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKPOINTS = {
    "Qwen3": "pocket",
    "hybrid": "pocket-hybrid",
    "windows": "pocket-windows",
    "latents": "pocket-latent",
}
SEED = 0
RANDOM: dict[str, Any] = dict(
    vocab_size=2048,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    initializer_range=0.2,  # wide logit gaps; with the usual 0.02, rounding could decide the token
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 32, "rope_theta": 5e5}
LLAMA = {"num_hidden_layers": 4, "initializer_range": 0.1}  # the fewer layers, the less it matters that int4 rounds
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "initializer_range": 0.1}
LATENTS = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENTS |= {"num_key_value_heads": 4, "head_dim": 8}
# the models that have no pocket of their own: their class in transformers, and what differs from RANDOM
RANDOM_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all kinds": ("Lfm3", {}),
    "Llama": ("Llama", LLAMA | {"rope_parameters": LLAMA_3, "attention_bias": True}),
    "Gemma 3": ("Gemma3Text", {"query_pre_attn_scalar": 16}),
    "Qwen3-MoE": ("Qwen3Moe", EXPERTS | {"num_experts": 8, "norm_topk_prob": True}),
    "DeepSeek-V2": ("DeepseekV2", LATENTS | EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1}),
}
NARROW = 23  # tokens that a window sees, otherwise
FEW = (
    "Once upon a time there was a small robot. The capital of France is",
    "Once upon a time there was a small robot. The opposite of hot is",
    "1, 2, 3, 4, 5, 6, 7, 8. 1, 2, 3, 4, 5, 6, 7, 8. 1, 2, 3,",
    "Once upon a time there was a small robot. The capital of Norway is",
)
SHARED = (
    "A cow says moo. The plural of mouse is mice. The past of go is went. A dog says woof. The plural of goose is "
    "geese. The past of see is saw. A cat says meow. The plural of tooth is teeth. The past of eat is ate. A duck says "
    "quack. The plural of foot is feet. The past of run is ran. A sheep says baa. The plural of man is men. "
    "The past of sing is sang."
)  # 107 tokens
COUNTRIES = (
    "France Japan Italy Spain Germany Portugal England Ireland Greece Austria Poland Hungary Norway Sweden Finland "
    "Denmark Iceland Romania Croatia Serbia Albania Latvia Estonia Lithuania Turkey China India Thailand Vietnam "
    "Indonesia Malaysia Mongolia Nepal Pakistan Bangladesh Cambodia Iran Iraq Jordan Lebanon Egypt Morocco Tunisia "
    "Algeria Kenya Ethiopia Ghana Nigeria"
)
WIDE = 128  # tokens that a window sees in a crowd: only sequences within their windows share reads


@dataclass(frozen=True)
class Asked:
    """The questions for a cell's engine."""

    model: str
    is_crowd: bool

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts. Those of a crowd have one length."""
        return crowd() if self.is_crowd else FEW

    @property
    def max_tokens(self) -> int:
        """The most tokens of an answer."""
        return 12 if self.is_crowd else 24

    @property
    def checkpoint(self) -> str:
        """The name of the model's checkpoint, or the directory of one that is made here."""
        if self.model in RANDOM_MODELS:
            return random_model(self.model, WIDE if self.is_crowd else NARROW).name
        return wide_windows().name if self.is_crowd and self.model == "windows" else CHECKPOINTS[self.model]


@functools.cache
def crowd() -> tuple[str, ...]:
    """Return 48 prompts of 113 tokens. The models know the language and then the money of these countries, so that the
    best logit is never closer than 0.3 to the second best.
    """
    return tuple(f"{SHARED} The main language of {name} is" for name in COUNTRIES.split())


@functools.cache
def wide_windows() -> tempfile.TemporaryDirectory:
    """Return a copy of pocket-windows with wider windows, which lasts as long as this process."""
    from mini_engine.checkpoint.directory import resolve_checkpoint

    folder = tempfile.TemporaryDirectory(prefix="wide-windows-")
    shutil.copytree(resolve_checkpoint("pocket-windows"), folder.name, dirs_exist_ok=True)
    config = Path(folder.name, "config.json")
    settings = json.loads(config.read_text(encoding="utf-8")) | {"sliding_window": WIDE}
    config.write_text(json.dumps(settings), encoding="utf-8")
    return folder


@functools.cache
def random_model(model: str, window: int) -> tempfile.TemporaryDirectory:
    """Return one of RANDOM_MODELS with pocket's tokenizer, which lasts as long as this process."""
    import torch
    import transformers

    from mini_engine.pocket import POCKET_DIR

    torch.manual_seed(SEED)
    name, changes = RANDOM_MODELS[model]
    config = getattr(transformers, f"{name}Config")(**RANDOM | changes)
    if hasattr(config, "sliding_window"):
        config.sliding_window = window
    folder = tempfile.TemporaryDirectory(prefix="random-model-")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder.name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(POCKET_DIR / file, Path(folder.name, file))
    return folder
