"""Course machinery. Training the pocket model: a small genuine Qwen3, next-token loss, AdamW, one pass after another."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from pocket.chats import END_OF_TEXT, TURN_END

WARMUP_STEPS = 100
GRADIENT_LIMIT = 1.0
MAX_POSITIONS = 8192


@dataclass(frozen=True)
class Plan:
    """The numbers of one training run. One step reads `batch_size` rows of `row_length` tokens."""

    seed: int = 0
    steps: int = 4000
    batch_size: int = 8
    row_length: int = 256
    learning_rate: float = 3e-3
    vocab_size: int = 2048
    hidden_size: int = 192
    layers: int = 6
    bfloat16: bool = True

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_size * self.row_length


def model_config(plan: Plan, tokenizer: Tokenizer) -> Qwen3Config:
    """Grouped-query heads (4 and 2), and a head_dim of 64 that is not hidden_size / heads."""
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=plan.hidden_size,
        intermediate_size=plan.hidden_size * 8 // 3,
        num_hidden_layers=plan.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


def rows(documents: list[list[int]], end: int, length: int, chooser: random.Random) -> Iterator[list[int]]:
    """Endless rows of `length` + 1 tokens. Each starts at a document's start; `end` closes each document.

    The document that crosses the row's end loses its tail: another pass meets it at another place.
    """
    while True:
        row: list[int] = []
        for document in chooser.sample(documents, len(documents)):
            row += document + [end]
            if len(row) > length:
                yield row[: length + 1]
                row = []


def learning_rate(plan: Plan, step: int) -> float:
    """A short warm-up, then a straight line down to zero."""
    warmup = min(WARMUP_STEPS, plan.steps // 10 + 1)
    return plan.learning_rate * min((step + 1) / warmup, (plan.steps - step) / (plan.steps - warmup + 1))


def make_optimizer(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), fused=True)


def loss_of(model: nn.Module, batch: torch.Tensor, bfloat16: bool) -> torch.Tensor:
    """Mean next-token loss in nats. batch: [batch_size, row_length + 1] int64."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def train(plan: Plan, documents: list[str], tokenizer: Tokenizer, report: Callable[[float], None]) -> Qwen3ForCausalLM:
    """Train a fresh model. `report` hears the loss of each step. The same plan and threads give the same weights."""
    torch.manual_seed(plan.seed)
    model = Qwen3ForCausalLM(model_config(plan, tokenizer)).train()
    optimizer = make_optimizer(plan, model)
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(documents)]
    stream = rows(encoded, tokenizer.token_to_id(END_OF_TEXT), plan.row_length, random.Random(plan.seed))
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step)
        batch = torch.tensor([next(stream) for _ in range(plan.batch_size)])
        loss = loss_of(model, batch, plan.bfloat16)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        report(loss.item())
    return model.eval()
