"""Course machinery. Writes a Qwen3 checkpoint of a real shape with random weights, to measure speed without a download.

A tensor's name is its seed, so the weights are the same each time. The answers are nonsense; their speed is the real
model's.
"""

import json
import math
import shutil
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.smoke.arguments import pocket_dir

from mini_engine.cli.parser import OneLineParser, guard

STD = 0.02
LONG_MEMORY = -4.6  # softplus of it is 0.01
DTYPES = ("bfloat16", "float32")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
QWEN3 = dict(vocab_size=151_936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960)
HYBRID = dict(linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, full_attention_interval=4)
# From the public config.json files. "hybrid-0.6B" is the 0.6B with delta nets in three layers of four (lesson 11);
# "small" is ours, for two cores and little time; "pocket" is the pocket model's.
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3 | dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "1.7B": QWEN3 | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16),
    "4B": QWEN3 | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "8B": QWEN3
    | dict(hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32)
    | dict(tie_word_embeddings=False),
    "small": QWEN3
    | dict(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8),
    "hybrid-0.6B": QWEN3
    | HYBRID
    | dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16)
    | dict(linear_num_key_heads=16, linear_num_value_heads=16),
    "pocket": dict(vocab_size=2048, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4)
    | dict(num_key_value_heads=2, head_dim=64, max_position_embeddings=8192),
}


def config_of(shape: str, dtype: str, tokenizer: bool = False) -> dict[str, Any]:
    """Return the config.json of a shape. With the pocket model's tokenizer, also with its end token."""
    sizes = SHAPES[shape]
    family = ("Qwen3_5ForCausalLM", "qwen3_5_text") if is_hybrid(shape) else ("Qwen3ForCausalLM", "qwen3")
    partial = {"partial_rotary_factor": 0.25} if is_hybrid(shape) else {}
    end = 2047 if tokenizer or sizes["vocab_size"] < QWEN3["vocab_size"] else 151_645
    return {
        "architectures": [family[0]],
        "model_type": family[1],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": dtype,
        "hidden_act": "silu",
        "initializer_range": STD,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"} | partial,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
    } | sizes


def is_hybrid(shape: str) -> bool:
    """Return whether a shape is lesson 11's."""
    return "linear_key_head_dim" in SHAPES[shape]


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of the model described by the directory's config.json."""
    import torch

    from mini_engine.checkpoint.config import Qwen3Config
    from mini_engine.checkpoint.json_files import read_json
    from mini_engine.hybrid.hybrid_config import HybridConfig
    from mini_engine.hybrid.model import hybrid_model
    from mini_engine.model.qwen3 import qwen3_model

    hybrid = read_json(directory / "config.json")["model_type"] != "qwen3"
    with torch.device("meta"):
        if hybrid:
            model = hybrid_model(HybridConfig.from_dir(directory))
        else:
            model = qwen3_model(Qwen3Config.from_dir(directory))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def drawn(name: str, shape: Sequence[int], dtype: str) -> Any:
    """Return a tensor: ones for a norm, otherwise normal.

    A delta net's dt_bias gives time steps of 0.01: with ones, it would forget within a few tokens.
    """
    import torch

    if len(shape) == 1:
        return torch.full(tuple(shape), LONG_MEMORY if name.endswith("dt_bias") else 1.0, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(math.prod(shape), generator=generator).mul_(STD).view(*shape).to(getattr(torch, dtype))


def write_random(directory: Path, shape: str, dtype: str, tokenizer: bool) -> int:
    """Write a checkpoint into `directory`, which must exist. Return the bytes of its weights.

    Args:
        tokenizer: also write the pocket model's tokenizer.
    """
    from rich.console import Console
    from rich.progress import track
    from safetensors.torch import save_file

    write_json(directory / "config.json", config_of(shape, dtype, tokenizer))
    shapes = track(tensor_shapes(directory).items(), "drawing weights", console=Console(stderr=True), transient=True)
    tensors = {name: drawn(name, sizes, dtype) for name, sizes in shapes}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    for name in TOKENIZER_FILES if tokenizer else ():
        shutil.copy(pocket_dir() / name, directory)
    return sum(tensor.nbytes for tensor in tensors.values())


def write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8", newline="\n")


def arguments():
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B", help="default: 0.6B")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: build/random-qwen3-SHAPE")
    parser.add_argument("--tokenizer", action="store_true", help="add the pocket model's tokenizer, for text prompts")
    parser.add_argument("--overwrite", action="store_true", help="replace the checkpoint in DIR")
    return parser


def run(args) -> int:
    """Write everything, or nothing."""
    from scripts.pocket.checkpoint import all_or_nothing

    from safetensors import SafetensorError

    from mini_engine.base.errors import UserError

    out = args.out or Path("build") / f"random-qwen3-{args.shape}"
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a directory, which is created if necessary")
    if out.is_dir() and any(out.iterdir()) and not args.overwrite:
        raise UserError(f"{out} is not empty; give another --out, or --overwrite to replace the checkpoint in it")
    try:
        with all_or_nothing(out) as directory:
            total = write_random(directory, args.shape, args.dtype, args.tokenizer)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    for old in {*out.glob("*.safetensors"), *out.glob("*.safetensors.index.json")} - {out / "model.safetensors"}:
        old.unlink()
    print(f"{out}: a model of shape {args.shape}, {args.dtype}, {total / 1e9:.2f} GB of random weights")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return guard(arguments(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
