"""Course machinery. Writes a pocket checkpoint: bfloat16 safetensors, Qwen's file names, and all files or none."""

import json
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.pocket.chats import END_OF_TEXT, TURN_END
from scripts.pocket.tokenizer import save_tokenizer

from tokenizers import Tokenizer
from transformers import PreTrainedModel


def write_checkpoint(model: PreTrainedModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Write all files that transformers and the course's loader need. Converts the model to bfloat16 in place."""
    model.bfloat16().save_pretrained(directory)
    save_tokenizer(tokenizer, directory, model.config.max_position_embeddings)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where loaders for older Qwen3 files look for it
    _write_json(directory / "config.json", config)
    end, turn_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)
    generation = {"bos_token_id": end, "do_sample": False, "eos_token_id": [turn_end, end], "pad_token_id": end}
    _write_json(directory / "generation_config.json", generation)
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors makes files readable by their owner only


def _write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8", newline="\n")


@contextmanager
def all_or_nothing(out: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `out`. If the block succeeds, its files move into `out`; otherwise none."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        yield Path(scratch)
        with _deaf_to_ctrl_c():
            out.mkdir(exist_ok=True)
            for file in sorted(Path(scratch).iterdir()):
                file.replace(out / file.name)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Defer Ctrl-C until a few renames are done."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
