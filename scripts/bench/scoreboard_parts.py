"""Course machinery. For suite `scoreboard`: the suites behind each page, with their options and their files."""

import shlex
from pathlib import PurePosixPath
from typing import NamedTuple


class Part(NamedTuple):
    """One run of a suite. file: where its figures are kept, in lessons/. quick: its options then; None leaves it out.

    page: a lesson's number, or a name. minutes and quick_seconds: what it takes on two shared cores, with all engines.
    """

    page: int | str
    suite: str
    file: str
    options: str
    minutes: float
    quick: str | None
    quick_seconds: int = 0

    @property
    def name(self) -> str:
        """Its file's name without the ending, such as "peers"."""
        return PurePosixPath(self.file).stem


LIMITS = '--step-tokens 2048 256 --only "closed, 8" "closed, 32"'
OTHERS = "ours vllm llama.cpp openvino"
BITS = "--parts quality attention decode --threads 2"
ONE_LONG = "--kinds full --histories 4096 16384 --batches 1 --no-transformers"
PARTS = (
    Part(7, "serving", "l7_server/serving.json", "--rounds 1", 9, "", 110),
    Part(7, "serving", "l7_server/serving-limits.json", f"--rounds 1 {LIMITS}", 6, None),
    Part(9, "peers", "l9_speed/peers.json", "--rounds 2", 16, f"--peers {OTHERS}", 130),
    Part(9, "peers", "l9_speed/behind.json", f"--peers {OTHERS} --behind 1x4096 8x4096 --rounds 1", 18, None),
    Part(9, "histories", "l9_speed/histories.json", f"{ONE_LONG} --rounds 5", 1, None),
    Part(9, "step", "l9_speed/step.json", "--rounds 9", 2, "--batches 1 --rounds 3", 15),
    Part(9, "step", "l9_speed/shared.json", "--shared --rounds 5", 1, None),
    Part(9, "step", "l9_speed/prefill.json", "--prefill --rounds 5", 1, None),
    Part(15, "windows", "l15_windows/windows.json", "--parts requests hits", 1.5, "--parts requests", 5),
    Part(15, "histories", "l15_windows/histories.json", "--rounds 3", 4, None),
    Part(16, "latents", "l16_latents/latents.json", "--parts requests reading step", 3, "--parts reading", 15),
    Part(17, "kv_dtype", "l17_bits/kv_dtype.json", BITS, 3, "--parts attention", 10),
    Part(17, "kv_dtype", "l17_bits/methods.json", "--parts methods", 1.5, None),
    Part("models", "families", "families.json", "--rounds 3 --batches 1", 10, None),
    Part(19, "handover", "l19_handover/handover.json", "--rounds 2", 4, "--tokens 500", 15),
)


def chosen(only: list[str], quick: bool) -> list[Part]:
    """Return the parts of these pages or of these names; all of them for an empty list."""
    found = [part for part in PARTS if not only or {str(part.page), part.name, part.suite} & set(only)]
    return [part for part in found if part.quick is not None] if quick else found


def options_of(part: Part, quick: bool) -> list[str]:
    """Return a part's options for its suite."""
    return [*shlex.split(part.quick or ""), "--quick"] if quick else shlex.split(part.options)
