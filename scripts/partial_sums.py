"""Lesson 18. Shows one row of one layer in two ranks: each rank's part in the memory that both see, and the sum.

Two processes compute a prompt. After each meeting of the layer, rank 0 reads the parts where both ranks have put them.
"""

import argparse
import os
import sys
from dataclasses import replace

import scripts.smoke  # noqa: F401 (before torch, so that its threads sleep while they wait)
from scripts.smoke.arguments import pocket_dir

from mini_engine.cli.parser import OneLineParser, guard, whole_number

PROMPT, SHOWN, NUM_RANKS = "The capital of France is", 4, 2


def parts_in(collectives, shape) -> list:
    """Return the parts of the latest meeting, by rank, as they are in shared memory: float32 of this shape."""
    import torch

    from mini_engine.distributed.tensor_parallel.shared_block import CACHE_LINE
    from mini_engine.distributed.tensor_parallel.shared_memory import PLACE_BYTES

    first = CACHE_LINE * (1 + NUM_RANKS)  # after the word that ends all waiting, and the flags
    memory = torch.frombuffer(collectives.block.buffer, dtype=torch.uint8)
    places = memory[first:].view(2, NUM_RANKS, PLACE_BYTES)[collectives.meeting.count % 2]
    return [place.view(torch.float32)[: shape.numel()].view(shape).clone() for place in places]


def stepped(parts) -> list:
    """Let ranks take the steps of `add_up` in turn over these parts; return each rank's sum."""
    from lessons.l18_ranks.one_shot import Board, add_up

    board, sums = Board(len(parts), parts[0].numel()), [part.flatten().clone() for part in parts]
    running = [add_up(x, board, rank, 1) for rank, x in enumerate(sums)]
    while running:
        running = [rank for rank in running if next(rank, "ended") != "ended"]
    return [x.view(parts[0].shape) for x in sums]


def listen(model, layer: int, note) -> None:
    """Call `note(name, outputs)` after each of the layer's two matrices whose outputs are sums over ranks."""
    part = model.model.layers[layer]
    for name, matrix in {"o_proj": part.self_attn.o_proj, "down_proj": part.mlp.down_proj}.items():
        matrix.register_forward_hook(lambda _, inputs, out, name=name: note(name, out.clone()))


def computed(engine) -> None:
    """Let an engine compute the prompt."""
    from mini_engine.engine.sampling_params import SamplingParams
    from mini_engine.text.tokenizer import Tokenizer

    engine.add_request("one", Tokenizer.load(pocket_dir()).encode(PROMPT), SamplingParams(max_tokens=1))
    engine.step()


def over_two(config, layer: int) -> dict:
    """Run the prompt over two ranks; return each matrix's sum in rank 0, the parts, and the ranks' processes."""
    import torch

    from mini_engine.assembly.build import over_ranks, start_ranks

    found = {}
    ranks, _ = start_ranks(pocket_dir(), config, torch.float32, transport="memory")
    with ranks:
        pids = [os.getpid(), *(process.pid for process in ranks.processes)]
        listen(
            ranks.model,
            layer,
            lambda name, out: found.update({name: (out, parts_in(ranks.collectives, out.shape), pids)}),
        )
        computed(over_ranks(ranks, config))
    return found


def run(args: argparse.Namespace) -> int:
    import torch

    from mini_engine.assembly.build import build_engine
    from mini_engine.assembly.engine_config import EngineConfig
    from mini_engine.assembly.loading import load

    whole, model = {}, load(pocket_dir(), "float32", "cpu")
    listen(model, args.layer, whole.__setitem__)
    config = EngineConfig(num_blocks=20, backend="reference")
    computed(build_engine(model, config))
    print(f"the last token of {PROMPT!r} in layer {args.layer}: numbers 0 to {SHOWN - 1} of {model.config.hidden_size}")
    for name, (total, parts, pids) in over_two(replace(config, tensor_parallel_size=NUM_RANKS), args.layer).items():
        print(f"after {name}")
        for rank, (part, pid) in enumerate(zip(parts, pids, strict=True)):
            show(f"rank {rank}'s part, process {pid}", part)
        show("the sum, in rank 0", total)
        show("one process, whole matrix", whole[name])
        same = all(torch.equal(x, total) for x in stepped(parts))
        print(f"  add_up over these two parts, step by step: {'the same bits' if same else 'OTHER BITS'} in both ranks")
    return 0


def show(title: str, x) -> None:
    """Print the first numbers of the last row."""
    print(f"  {title:<30}" + "".join(f"{number:12.7f}" for number in x[-1, :SHOWN].tolist()))


def main(argv=None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--layer", type=whole_number(0, 5), default=0, metavar="N", help="0 to 5 (default: 0)")
    return guard(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
