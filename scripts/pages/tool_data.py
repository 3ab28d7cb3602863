"""Course machinery. Writes the numbers behind the small tools of lessons 4, 6 and 13.

    python -m scripts.pages.tool_data                 # all of them; the simulation takes a minute or two
    python -m scripts.pages.tool_data --only bytes

Each is a script, `site/theme/assets/js/tools/NAME.data.js`, because a page opened from disk can load nothing else.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts import ROOT

FOLDER = ROOT / "site" / "theme" / "assets" / "js" / "tools"
PROMPT, SHOWN = "This is the word. The", 11  # as in lesson 4's player
BETAS = (0, 0.03, 0.1, 0.2, 0.3, 0.5, 1, 2, 3, 10)
REPLICAS, CAPACITY = (4, 16, 64), 3_000  # as in lesson 13's tables
PREFILL, DECODE = 10_000, 40  # tokens/s of a replica, and of one answer


def sampler(prompt: str = PROMPT) -> dict[str, Any]:
    """Return the pocket model's logits after a prompt, rounded, and the words of the best ones."""
    import torch

    from mini_engine.families.qwen3 import load_model
    from mini_engine.kv.no_cache import NoCache, Recompute
    from mini_engine.pocket import POCKET_DIR
    from mini_engine.text.tokenizer import Tokenizer

    tokenizer, model = Tokenizer(POCKET_DIR), load_model(POCKET_DIR)
    ids = tokenizer.encode(prompt)
    with torch.inference_mode():
        logits = model(torch.tensor(ids), NoCache(), Recompute().plan(ids), rows=torch.tensor([len(ids) - 1]))[0]
    best = logits.topk(SHOWN).indices.tolist()
    words = [[token, tokenizer.token_bytes[token].decode("utf-8", "replace").strip()] for token in best]
    return {"prompt": prompt, "logits": [round(value, 3) for value in logits.tolist()], "words": words}


def text_bytes() -> dict[str, Any]:
    """Return the pocket model's tokenizer: the ids of the 256 bytes, and the pairs that are merged, by rank.

    A pair becomes the id that follows those of the bytes and of the pairs before it.

    Raises:
        ValueError: this vocabulary has other ids.
    """
    from mini_engine.pocket import POCKET_DIR
    from mini_engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(POCKET_DIR)
    model = json.loads((POCKET_DIR / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocab = model["vocab"]
    single = {token: index for index, token in enumerate(tokenizer.token_bytes) if len(token) == 1}
    merges = [[vocab[left], vocab[right]] for left, right in model["merges"]]
    if [vocab[left + right] for left, right in model["merges"]] != list(range(256, 256 + len(merges))):
        raise ValueError("the ids of merged pairs do not follow one another")
    special = {text: tokenizer.encode(text)[0] for text in tokenizer.special_texts}
    return {"bytes": [single[bytes([byte])] for byte in range(256)], "merges": merges, "special": special}


def beta() -> dict[str, Any]:
    """Return the results of lesson 13's simulation for each number of replicas and each β."""
    from scripts.bench.arrivals import generated

    rows = [[cell(replicas, price) for price in BETAS] for replicas in REPLICAS]
    return {"betas": BETAS, "replicas": REPLICAS, "rows": rows, "requests": len(generated())}


def cell(num_replicas: int, price: float) -> list[float]:
    """Simulate the generated requests; return blocks found in %, busiest / mean load, median seconds to first token."""
    from scripts.bench.arrivals import generated
    from scripts.bench.routing import outcome, waits

    from lessons.l13_machines.simulate import Rates, simulate
    from lessons.l20_agents.traces import TRACE_BLOCK
    from mini_engine.distributed.routing.policy import PrefixScore

    requests, rates = generated(), Rates(PREFILL / TRACE_BLOCK, DECODE)
    served = simulate(requests, PrefixScore(price, CAPACITY), num_replicas, CAPACITY, rates)
    found = outcome(requests, served, num_replicas) | waits(served)
    return [round(found["found %"], 1), round(found["max / mean load"], 2), round(found["TTFT p50 s"], 2)]


MAKERS: dict[str, Callable[[], dict[str, Any]]] = {"sampler": sampler, "bytes": text_bytes, "beta": beta}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.data.js"


def read_data(name: str) -> dict[str, Any]:
    """Return the numbers in a tool's file."""
    return json.loads(path_of(name).read_text(encoding="utf-8").partition(" = ")[2].rstrip(";\n"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MAKERS, help="write one of them")
    args = parser.parse_args(argv)
    for name in [args.only] if args.only else MAKERS:
        data = json.dumps(MAKERS[name](), ensure_ascii=False, separators=(",", ":"))
        text = (
            f"// Written by scripts/pages/tool_data.py: do not edit, write again.\nwindow.KvToolData_{name} = {data};\n"
        )
        path_of(name).write_text(text, encoding="utf-8", newline="\n")
        print(f"wrote {path_of(name).relative_to(ROOT)}: {len(text.encode()):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
