"""Lesson 17. K and V in 8 and in 4 bits in every way that an engine runs: the same tokens each time, and KL.

Full precision is compared with Hugging Face. With fewer bits, a path must give each prompt's tokens when run alone by
the reference kernel with as few bits: rounding does not depend on the batch, the chunks or where blocks come from.
"""

import sys
from functools import partial

from scripts.pocket.prompts import COURSE_PROMPTS
from scripts.smoke.arguments import long_prompt, make_parser
from scripts.smoke.paths import CHUNK, alone, batched, cached, if_possible, preempted, rounded
from scripts.smoke.run import Outcome
from scripts.smoke.several import run_paths
from scripts.smoke.tiers import host
from scripts.smoke.trial import Trial


def full(trial: Trial) -> Outcome:
    """Run the prompts one after another in full precision, and judge the effect of fewer bits on predictions."""
    from scripts.bench.kv_quality import compare  # it imports torch, after scripts.smoke has set OpenMP up

    done = alone(trial)
    texts = [ids + answer for ids, answer in zip(trial.prompts, done.outputs, strict=True)]
    done.kv["KL"] = {name: f"{found.kl:.1e}" for name, found in compare(trial.model, texts).items() if name != "full"}
    return done


WAYS = {
    "alone": alone,
    "batched": batched,
    "chunked": partial(batched, chunk=CHUNK),
    "preempted": partial(preempted, tight=True),
    "cached": cached,
    "host": host,
}
MORE_WAYS = {
    "fast layers": partial(if_possible, backend="auto"),
    "speculation": partial(batched, speculate=4),
    **{f"kernel {name}": partial(if_possible, kernel=name) for name in ("torch", "cpu")},
}


def in_fewer_bits(ways) -> dict:
    """Return each way with each number of bits, by name."""
    names = {f"{bits} {name}": (bits, way) for bits in ("int8", "int4") for name, way in ways.items()}
    return {name: partial(rounded, kv_dtype=bits, path=way) for name, (bits, way) in names.items()}


PATHS, MORE = {"float32": full} | in_fewer_bits(WAYS), in_fewer_bits(MORE_WAYS)


def arguments():
    return make_parser(__doc__, block_size=8, kernel=True, also="also run fast layers, speculation and every kernel")


def main(argv=None) -> int:
    return run_paths(17, Trial, PATHS, arguments(), argv, [long_prompt(12), *COURSE_PROMPTS[1::5]], MORE)


if __name__ == "__main__":
    sys.exit(main())
