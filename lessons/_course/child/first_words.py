"""Course machinery. Run by `doctor`: reports the GPU and the C++ compiler, and lets the model generate a few words.

Prints JSON lines: {"name": …, "state": ok | absent | missing, "text": …}.
"""

import json
import time

PROMPT = "The capital of France is"
NEW_TOKENS = 24


def say(name: str, state: str, text: str) -> None:
    print(json.dumps({"name": name, "state": state, "text": text}), flush=True)


def devices() -> None:
    import torch

    if torch.cuda.is_available():
        say("GPU", "ok", torch.cuda.get_device_name())
    else:
        say("GPU", "absent", "none that torch can use; the CPU is enough, but tests that need a GPU are NOT CHECKED")


def compiler() -> None:
    try:
        from mini_engine.base.native_build import find_compiler

        say("C++ compiler", "ok", find_compiler())
    except ImportError as error:
        say("C++ compiler", "absent", f"not checked: {error}")
    except ValueError:
        say("C++ compiler", "absent", "none; lesson 3's C++ kernel is not used and its tests are NOT CHECKED")


def pocket_model() -> None:
    from tokenizers import Tokenizer

    from mini_engine.engine.loop import generate
    from mini_engine.families.qwen3 import load_model
    from mini_engine.kv.no_cache import NoCache, Recompute
    from mini_engine.pocket import POCKET_DIR

    tokenizer = Tokenizer.from_file(str(POCKET_DIR / "tokenizer.json"))
    model = load_model(POCKET_DIR)
    started = time.perf_counter()
    ids = tokenizer.encode(PROMPT).ids
    new = generate(model, NoCache(), Recompute(), ids, NEW_TOKENS, model.config.eos_token_ids)
    took = time.perf_counter() - started
    say("pocket model", "ok", f"{len(new)} tokens in {took:.2f} s:\n{tokenizer.decode(ids + new)}")


if __name__ == "__main__":
    devices()
    compiler()
    pocket_model()
