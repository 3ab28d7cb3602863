"""Course machinery. The settings of one training run."""

from dataclasses import dataclass

WARMUP_STEPS = 40
MAX_POSITIONS = 8192
KINDS = {  # with their different defaults
    "qwen3": {"layers": 6, "steps": 1800},
    "hybrid": {"layers": 8, "steps": 600},
    "latent": {"layers": 6, "steps": 1800},
}


@dataclass(frozen=True)
class Plan:
    """The settings of a run. One step reads `batch_size` rows of `row_length` tokens.

    start_from: the directory of an earlier run's checkpoint, whose weights this run starts with; empty for random ones.
    first_step: the steps of that run: this one continues in the text where it ended.
    """

    kind: str = "qwen3"  # "hybrid": Qwen3.5, gated delta nets in three layers of four; "latent": a dense DeepSeek-V3
    seed: int = 0
    threads: int = 2
    steps: int = 1800
    batch_size: int = 8
    row_length: int = 256
    learning_rate: float = 3e-3
    vocab_size: int = 2048
    hidden_size: int = 192
    layers: int = 6
    start_from: str = ""
    first_step: int = 0
    float32: bool = False  # otherwise matrix products run in bfloat16, while the weights stay float32

    @property
    def tokens(self) -> int:
        """The number of tokens that the run reads."""
        return self.steps * self.batch_size * self.row_length

    def rate_factor(self, step: int) -> float:
        """Return the learning rate's factor: a short warm-up, then a linear decay to zero."""
        warmup = min(WARMUP_STEPS, self.steps // 10 + 1)
        return min((step + 1) / warmup, max(0, self.steps - step) / (self.steps - warmup + 1))
