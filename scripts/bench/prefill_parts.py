"""Course machinery. For `step --prefill`: where a prefill step's time goes, and oneDNN's time for its matrices.

Lesson 9's C++ times its parts itself, per thread; between two of them a thread waits for the others. The rest of the
model is the vocabulary head, the last norm and Python; the rest of the step is the scheduler, the plan and the sampler.
The limit of the matrices is oneDNN with packed weights on matrices of the same shapes, in the same rounds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from scripts.bench.common import Report
from scripts.bench.options import checkpoint_of
from scripts.bench.turns import Timing, seconds_of

import torch

from mini_engine.attention.registry import load_kernel
from mini_engine.base.errors import UserError
from mini_engine.checkpoint.config import DTYPES
from mini_engine.engine.engine import Engine
from mini_engine.engine.runner import plan_step
from mini_engine.engine.sampling_params import SamplingParams
from mini_engine.engine.scheduler_config import SchedulerConfig
from mini_engine.families.qwen3 import load_model
from mini_engine.layers import native, speed_up
from mini_engine.layers.packed_layers import PackedModel

MATRICES = "matrices"
BATCH, LENGTH = 8, 256


class Round(NamedTuple):
    """Seconds of one round: the parts by name, the whole model call, the whole step, and oneDNN's matrices."""

    parts: dict[str, float]
    model: float
    step: float
    onednn: float


def check_timed(model, option: str) -> None:
    """Raise a UserError if lesson 9's packed layers or lesson 3's C++ kernel do not work here."""
    kernel = load_kernel("auto", torch.device("cpu"), model.dtype)
    if not isinstance(model.model, PackedModel) or getattr(kernel, "name", "") != "cpu":
        raise UserError(f"step {option} times lesson 9's C++ from within, and there is no compiler for it here")


class Prefill:
    """A step of BATCH new prompts of LENGTH tokens each, which can be repeated.

    Raises:
        UserError: lesson 9's packed layers or lesson 3's C++ kernel do not work here.
    """

    def __init__(self, model) -> None:
        check_timed(model, "--prefill")
        self.model = model
        limits = SchedulerConfig(max_num_seqs=BATCH, max_num_batched_tokens=BATCH * LENGTH, chunked_prefill_size=LENGTH)
        num_blocks = BATCH * (LENGTH // 16 + 2) + 1
        self.engine = Engine.for_model(model, num_blocks=num_blocks, scheduler_config=limits)
        self.pool = self.engine.runner.pool
        self.others = onednn_matrices(model, BATCH * LENGTH)

    def round(self) -> Round:
        """Run oneDNN's matrices, the step, and its model call once more with the parts timed."""
        onednn = seconds_of(self.others)
        self.add_prompts()
        plan = plan_step(self.engine.scheduler.schedule(), 16, self.pool.device)
        self.drop_prompts()
        with self.model.model.timed() as seconds, torch.inference_mode():
            whole = seconds_of(lambda: self.model(plan.token_ids, self.pool, plan.meta, rows=plan.rows))
        self.add_prompts()
        step = seconds_of(self.engine.step)
        self.drop_prompts()
        return Round(dict(zip(native.PARTS, seconds.mean(0).tolist(), strict=True)), whole, step, onednn)

    def add_prompts(self) -> None:
        for i in range(BATCH):
            ids = torch.randint(self.model.config.vocab_size, (LENGTH,)).tolist()
            self.engine.add_request(str(i), ids, SamplingParams(temperature=0, max_tokens=2))

    def drop_prompts(self) -> None:
        for i in range(BATCH):
            self.engine.abort(str(i))


def onednn_matrices(model, rows: int) -> Callable[[], None]:
    """Return a call of oneDNN's packed linears for all layers: q, k and v as one matrix, gate and up as another."""
    linears = model.model.layers[0].linears
    joined = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
    shapes = [
        (sum(linears[n].packed.out_features for n in names), linears[names[0]].packed.in_features) for names in joined
    ]
    packs = model.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    pairs = []
    for outputs, inputs in shapes:
        weight = torch.randn(outputs, inputs).to(model.dtype)
        x = torch.randn(rows, inputs).to(model.dtype)
        pairs.append((x, torch.ops.mkldnn._reorder_linear_weight(weight, rows) if packs else weight))

    def run() -> None:
        with torch.inference_mode():
            for _ in range(model.config.num_hidden_layers):
                for x, weight in pairs:
                    if packs:
                        torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
                    else:
                        torch.nn.functional.linear(x, weight)

    return run


def measure(args) -> Report:
    """Measure the step in rounds, and report each part's median."""
    directory = checkpoint_of(args)
    prefill = Prefill(speed_up(load_model(directory, DTYPES[args.dtype])))
    prefill.round()
    rounds = [prefill.round() for _ in range(args.rounds or (3 if args.quick else 7))]
    notes = [f"{directory}, {args.dtype}, {BATCH} prompts of {LENGTH} tokens in one step", verdict(rounds)]
    return Report("step", rows_of(rounds), notes)


def rows_of(rounds: list[Round]) -> list[dict[str, Any]]:
    """Return a row for each part and one for the whole step. The rests are the medians' differences, at least 0."""
    timings = {part: Timing([one.parts[part] for one in rounds]) for part in rounds[0].parts}
    model, step = (Timing([getattr(one, what) for one in rounds]) for what in ("model", "step"))
    onednn = Timing([one.onednn for one in rounds]).median
    parts = {part: (timing.median, timing.spread) for part, timing in timings.items()}
    in_parts = Timing([sum(one.parts.values()) for one in rounds]).median
    parts["head and Python"] = (max(0.0, model.median - in_parts), model.spread)
    parts["rest of the engine"] = (max(0.0, step.median - model.median), step.spread)
    parts["whole step"] = (step.median, step.spread)
    return [
        {
            "part": part,
            "ms": seconds * 1e3,
            "± %": spread * 100,
            "% of step": 100 * seconds / step.median,
            "oneDNN, ms": onednn * 1e3 if part == MATRICES else None,
            "× oneDNN": seconds / onednn if part == MATRICES else None,
        }
        for part, (seconds, spread) in parts.items()
    ]


def verdict(rounds: list[Round]) -> str:
    """Compare the matrices' time with oneDNN's and everything else's with the step's, each within its round."""
    ratio = Timing([one.parts[MATRICES] / one.onednn for one in rounds])
    others = Timing([1 - one.parts[MATRICES] / one.model for one in rounds])
    return (
        f"within a round: the matrices take {ratio.median:.3f} times oneDNN's time (± {100 * ratio.spread:.1f} %), "
        f"everything else {100 * others.median:.1f} % of the model's"
    )
