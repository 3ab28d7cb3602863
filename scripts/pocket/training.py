"""Course machinery. Trains a pocket model: small and genuine, next-token loss, Muon for the matrices."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from scripts.pocket.chats import END_OF_TEXT
from scripts.pocket.models import new_model
from scripts.pocket.newton_schulz import muon_in_float32

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedModel

SEED, ROWS, ROW_LENGTH = 0, 8, 256  # a step reads ROWS rows, or one of as many tokens
GRADIENT_LIMIT, WARMUP_STEPS, LONG_EVERY = 1.0, 40, 10


@dataclass(frozen=True)
class Plan:
    """The settings of a run.

    start_from: the directory of an earlier run's checkpoint, whose weights this run starts with; empty for random ones.
    first_step: the steps of that run: this one continues in the text where it ended.
    float32: otherwise matrix products run in bfloat16, while the weights stay float32.
    """

    kind: str
    threads: int
    steps: int
    learning_rate: float
    start_from: str = ""
    first_step: int = 0
    float32: bool = False

    def rate_factor(self, step: int) -> float:
        """Return the learning rate's factor: a short warm-up, then a linear decay to zero."""
        warmup = min(WARMUP_STEPS, self.steps // 10 + 1)
        return min((step + 1) / warmup, max(0, self.steps - step) / (self.steps - warmup + 1))


def row(documents: Iterator[list[int]], length: int) -> list[int]:
    """Return `length` + 1 tokens, beginning at a document's start. The last document may be cut, in this pass only."""
    tokens: list[int] = []
    while len(tokens) <= length:
        tokens += next(documents)
    return tokens[: length + 1]


def batches(documents: list[list[int]]) -> Iterator[torch.Tensor]:
    """Yield [rows, length + 1] int64 batches forever, every document once per pass, in an order set by SEED.

    Every tenth batch is one long row of the same number of tokens, which teaches the model to attend far back.
    """
    chooser = random.Random(SEED)
    stream = (document for _ in itertools.count() for document in chooser.sample(documents, len(documents)))
    for step in itertools.count(1):
        count, length = (ROWS, ROW_LENGTH) if step % LONG_EVERY else (1, ROWS * ROW_LENGTH)
        yield torch.tensor([row(stream, length) for _ in range(count)])


def make_optimizers(model: PreTrainedModel, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan, 2024) for the layers' matrices, and AdamW for the embedding and the norms.

    Muon learns these facts from about a third of the tokens that AdamW needs, which matters on two cores.
    """
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    rest = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def loss_of(model: nn.Module, batch: torch.Tensor, float32: bool) -> torch.Tensor:
    """Return the mean next-token loss in nats. batch: [rows, length + 1] int64."""
    with torch.autocast("cpu", torch.bfloat16, enabled=not float32):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def train(plan: Plan, documents: list[str], tokenizer: Tokenizer) -> PreTrainedModel:
    """Train a model. The same plan and threads give the same weights."""
    torch.manual_seed(SEED)
    torch.set_num_threads(plan.threads)
    torch.set_flush_denormal(plan.kind == "hybrid")  # decayed states hold many, and each costs a CPU dearly
    model: PreTrainedModel = (
        AutoModelForCausalLM.from_pretrained(plan.start_from, dtype=torch.float32)
        if plan.start_from
        else new_model(plan.kind, tokenizer)
    ).train()
    optimizers = make_optimizers(model, plan.learning_rate)
    steppers = [*optimizers, *(LambdaLR(optimizer, plan.rate_factor) for optimizer in optimizers)]
    encoded = [encoding.ids for encoding in tokenizer.encode_batch([text + END_OF_TEXT for text in documents])]
    steps = itertools.islice(batches(encoded), plan.first_step, plan.first_step + plan.steps)
    with muon_in_float32(plan.float32):
        for batch in track(steps, "training", total=plan.steps, console=Console(stderr=True)):
            model.zero_grad()
            loss_of(model, batch, plan.float32).backward()
            nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_LIMIT)
            for stepper in steppers:
                stepper.step()
    return model.eval()
