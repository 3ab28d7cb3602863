"""Course machinery. For suite `peers`: a Qwen3 checkpoint as the GGUF file that llama.cpp reads, in bfloat16.

llama.cpp's own converter wants a tokenizer that it knows. Random weights have none, so this writes the same tensors and
keys with llama.cpp's `gguf` package, and a vocabulary with a text for every id: its server turns each token into text.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mini_engine.checkpoint.config import Qwen3Config


def write_gguf(model: Path, path: Path) -> None:
    """Write a checkpoint directory's weights to `path`. The file appears only once it is complete."""
    import gguf  # pyright: ignore[reportMissingImports]  (llama.cpp's, on the path of this process alone)

    config = Qwen3Config.from_dir(model)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3")
    add_sizes(writer, config)
    add_vocabulary(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                add_tensor(writer, names.get_name(name, (".weight",)), tensors.get_tensor(name), gguf)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)


def add_sizes(writer: Any, config: Qwen3Config) -> None:
    """Write what llama.cpp must know of the model's shape."""
    writer.add_name("bench")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def add_vocabulary(writer: Any, config: Qwen3Config) -> None:
    """Write a byte-level vocabulary with a text for every id."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"Ġt{i}" for i in range(config.vocab_size)])  # Ġ stands for a space
    writer.add_token_types([1] * config.vocab_size)  # 1: a normal token
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(config.eos_token_ids[0])


def add_tensor(writer: Any, name: str, tensor: torch.Tensor, gguf: Any) -> None:
    """Write a matrix in bfloat16 and a norm in float32, as llama.cpp's converter does."""
    if tensor.dim() == 1:
        writer.add_tensor(name, tensor.float().numpy())
        return
    packed = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.BF16)
